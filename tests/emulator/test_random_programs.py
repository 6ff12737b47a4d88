"""Random programs of branches and loops, written in CUDA and in Python at once: every thread must agree."""

from __future__ import annotations

import random

import numpy as np
import pytest

from .conftest import Out, run_cuda

THREADS, BLOCKS = 96, 5


class Writer:
    """Write one random program twice, line by line; t is the thread, x, y and z its variables."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.cuda: list[str] = []
        self.python: list[str] = []
        self.loops = 0
        self.may_return = False

    def line(self, cuda: str, python: str, depth: int) -> None:
        """The same statement in both languages."""
        self.cuda.append("    " * (depth + 1) + cuda)
        self.python.append("    " * (depth + 1) + python)

    def operand(self) -> str:
        return self.random.choice(["x", "y", "z", "t", str(self.random.randrange(64))])

    def condition(self) -> str:
        left, right = self.operand(), self.operand()
        return self.random.choice(
            [
                f"({left} & 7) < ({right} & 7)",
                f"({left} ^ t) & 1",
                f"{left} > {right}",
                f"t % 5 == {self.random.randrange(5)}",
            ]
        )

    def assignment(self, depth: int) -> None:
        target = self.random.choice("xyz")
        a, b = self.operand(), self.operand()
        value = self.random.choice(
            [
                f"{a} * 5 + {b}",
                f"{a} + {b} + 3",
                f"({a} ^ {b}) + 1",
                f"{a} * {b}",
                f"({a} >> 3) + {b}",
                f"({a} & {b}) * 9",
            ]
        )
        text = f"{target} = ({value}) & 65535"
        self.line(text + ";", text, depth)

    def block(self, depth: int, size: int, in_loop: bool) -> None:
        """Statements, nested at most four deep."""
        for _ in range(size):
            kind = self.random.random()
            if depth >= 4 or kind < 0.4:
                self.assignment(depth)
            elif kind < 0.65:
                condition = self.condition()
                self.line(f"if ({condition}) {{", f"if {condition}:", depth)
                self.block(depth + 1, self.random.randint(1, 3), in_loop)
                if self.random.random() < 0.5:
                    self.line("} else {", "else:", depth)
                    self.block(depth + 1, self.random.randint(1, 3), in_loop)
                self.cuda.append("    " * (depth + 1) + "}")
            elif kind < 0.85:
                name, trips = f"i{self.loops}", f"({self.operand()} & 3) + {self.random.randrange(3)}"
                self.loops += 1
                self.line(
                    f"for (int {name} = 0, n = {trips}; {name} < n; {name}++) {{",
                    f"for {name} in range({trips}):",
                    depth,
                )
                self.line(f"x = (x + {name}) & 65535;", f"x = (x + {name}) & 65535", depth + 1)
                self.block(depth + 1, self.random.randint(1, 4), True)
                self.cuda.append("    " * (depth + 1) + "}")
            elif in_loop:
                condition, jump = self.condition(), self.random.choice(["break", "continue"])
                self.line(f"if ({condition}) {jump};", f"if {condition}: {jump}", depth)
            elif kind > 0.9 and self.may_return:
                condition = self.condition()
                self.line(f"if ({condition}) {{ out[g] = y; return; }}", f"if {condition}: return y", depth)
            else:
                self.assignment(depth)

    def exchange(self) -> None:
        """All threads of a block give x and take another's, between two barriers."""
        factor, shift = self.random.choice([1, 5, 7]), self.random.randrange(THREADS)
        source = f"(t * {factor} + {shift}) % {THREADS}"
        self.line(f"s[t] = x; __syncthreads(); x = s[{source}]; __syncthreads();", f"x = yield x, {source}", 0)


def write_program(seed: int) -> tuple[str, str]:
    """CUDA text and Python text of the same function of g; in Python a generator that yields at each exchange."""
    writer = Writer(seed)
    for _ in range(3):
        writer.block(0, 4, False)
        writer.exchange()
    writer.may_return = True
    writer.block(0, 5, False)
    cuda = [
        'extern "C" __global__ void k(int* out) {',
        f"    __shared__ int s[{THREADS}];",
        f"    int t = threadIdx.x, g = blockIdx.x * {THREADS} + t, x = g, y = 3, z = g * 7;",
        *writer.cuda,
        "    out[g] = x + y * 3 + z * 5;",
        "}",
    ]
    python = [
        "def program(g):",
        f"    t, x, y, z = g % {THREADS}, g, 3, g * 7",
        *writer.python,
        "    return x + y * 3 + z * 5",
    ]
    return "\n".join(cuda), "\n".join(python)


def run_block(program, block: int) -> list[int]:
    """The threads of a block in Python: from exchange to exchange, then the results."""
    threads = [program(block * THREADS + t) for t in range(THREADS)]
    offers = [next(thread) for thread in threads]
    while True:
        taken = [offers[source][0] for _, source in offers]
        offers, results = [], []
        for thread, value in zip(threads, taken, strict=True):
            try:
                offers.append(thread.send(value))
            except StopIteration as end:
                results.append(end.value)
        if results:
            return results


@pytest.mark.parametrize("seed", range(30))
def test_random_program(seed):
    """Nested divergence, break, continue, barriers and early return, in every thread of five blocks."""
    cuda, python = write_program(seed)
    namespace: dict = {}
    exec(python, namespace)
    expected = [value for block in range(BLOCKS) for value in run_block(namespace["program"], block)]
    assert len(set(expected)) > 5  # a program that says the same for every thread shows nothing
    run = run_cuda(cuda, [Out(THREADS * BLOCKS, np.int32)], grid=BLOCKS, block=THREADS, check_races=True)
    np.testing.assert_array_equal(run.out, expected, cuda)
    assert run.report.race_count == 0
