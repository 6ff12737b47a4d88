"""Issue a loop for all warps of one multiprocessor, cycle by cycle, and read off how long an iteration takes.

Four sub-partitions, each with one issue slot and its own FMA, ALU, special-function and tensor pipes, an address unit
and a queue of memory instructions; one shared-memory pipe and one L2 port for all of them; block barriers, scoreboards
and cp.async groups as the control bits say. docs/model.md tells the story.
"""

from collections.abc import Sequence

from .board import Board
from .errors import SassError
from .occupancy import SUB_PARTITIONS
from .plan import BARRIER, COMMIT, COPY, LOAD, READ, REDUCE, Step
from .rates import MEMORY

NEVER = 1e18
QUEUE_TO_PIPE = 3.0  # cycles from the address unit to the shared pipe [?]
OPERANDS_READ = 6.0  # a memory instruction frees its source registers so long after it starts (9-13 from issue [L])
ARITHMETIC_READ = 2.0  # the same for the other pipes, after the pipe [?]
STORED = 10.0  # a store's data is in shared memory so long after its wavefronts [?]
QUEUED = 30.0  # LDGSTS and RED release their own write scoreboard so long after they start [?]


class Multiprocessor:
    """The state of one SM running equal blocks, one for each entry of `begins`: the cycle in which it starts."""

    def __init__(self, steps: Sequence[Step], trips: int, warps: int, begins: Sequence[float], board: Board) -> None:
        blocks = len(begins)
        count = warps * blocks
        self.steps, self.warps_of_a_block = list(steps), warps
        self.pipes = [step[0] for step in steps]
        self.left = [trips] * count
        self.place = [0] * count  # index of the next step of each warp
        self.ready = [begins[w // warps] for w in range(count)]  # stall, scoreboards and barrier allow the next step
        self.scoreboards = [[0.0] * 6 for _ in range(count)]
        self.groups: list[list[list[float]]] = [[[] for _ in range(6)] for _ in range(count)]
        self.copied = [0.0] * count  # when the last cp.async of a warp lands
        self.starts: list[list[float]] = [[] for _ in range(count)]  # of each iteration of each warp
        self.arrived = [0] * blocks
        self.ready_but_barred = [0.0] * count
        self.pipe_free = [[0.0] * 4 for _ in range(SUB_PARTITIONS)]
        self.path = board.path
        self.queue = [[0.0] * self.path.queue_depth for _ in range(SUB_PARTITIONS)]
        self.address_free = [0.0] * SUB_PARTITIONS
        self.shared_free = self.l2_free = 0.0
        self.l2_rate, self.l2_latency = board.l2_bytes_per_clock_sm, board.l2_latency
        self.priority = _priorities(count, self.path.greedy)
        self.issued = [-1.0] * SUB_PARTITIONS
        self.current: list[list[int]] = [list(range(s, count, SUB_PARTITIONS)) for s in range(SUB_PARTITIONS)]
        self.time = [NEVER] * SUB_PARTITIONS  # of the next issue of each sub-partition, and the warp that makes it
        self.chosen = [0] * SUB_PARTITIONS
        for s in range(SUB_PARTITIONS):
            self._choose(s, 0.0)

    def run(self) -> list[list[float]]:
        """Issue until every warp has made its trips; the start of each iteration of each warp, in cycles.

        One long function, because this is where the time of a prediction goes: a call costs what it would do.
        """
        steps, ready, place, left, time = self.steps, self.ready, self.place, self.left, self.time
        last = len(steps) - 1
        alive = len(ready)
        while alive:
            now = min(time)
            if now >= NEVER:
                raise SassError("every warp waits at a barrier that cannot open: the listed path is not what warps run")
            s = time.index(now)
            w = self.chosen[s]
            i = place[w]
            if i == 0:
                self.starts[w].append(now)
            pipe, busy, kind, held, later, l2_bytes, stall, write, read, waits, awaited = steps[i]
            scoreboard = self.scoreboards[w]
            if pipe == MEMORY:
                done, operands = self._request(s, w, now, kind, held, later, l2_bytes)
            else:
                done = now + busy
                if pipe < MEMORY:
                    self.pipe_free[s][pipe] = done
                operands = done + ARITHMETIC_READ
                done += later
            if read < 6 and operands > scoreboard[read]:
                scoreboard[read] = operands
            if kind == COMMIT:
                self.groups[w][write if write < 6 else 0].append(self.copied[w])
            elif write < 6 and done > scoreboard[write]:
                scoreboard[write] = done
            may = now + stall
            for k in waits:
                if scoreboard[k] > may:
                    may = scoreboard[k]
            if awaited is not None:
                groups = self.groups[w][awaited[0]]
                if len(groups) > awaited[1] and groups[-1 - awaited[1]] > may:
                    may = groups[-1 - awaited[1]]
            if i == last:
                place[w] = 0
                left[w] -= 1
                if not left[w]:
                    alive -= 1
                    may = NEVER
            else:
                place[w] = i + 1
            self.issued[s] = now
            self.current[s] = self.priority[w]
            if kind == BARRIER:
                self._arrive(s, w, now, may)
            else:
                ready[w] = may
            self._choose(s, now + 1)
        return self.starts

    def _choose(self, s: int, floor: float) -> None:
        """Set the next issue of sub-partition s: the first warp in order that is ready at `floor`, or the earliest."""
        ready, pipes, place, free, head = self.ready, self.pipes, self.place, self.pipe_free[s], self.queue[s][0]
        best, chosen = NEVER, 0
        for w in self.current[s]:
            at = ready[w]
            if at >= best:
                continue
            pipe = pipes[place[w]]
            if pipe < MEMORY:
                if free[pipe] > at:
                    at = free[pipe]
            elif pipe == MEMORY and head > at:
                at = head
            if at <= floor:
                best, chosen = floor, w
                break
            if at < best:
                best, chosen = at, w
        self.time[s], self.chosen[s] = best, chosen

    def _request(
        self, s: int, w: int, now: float, kind: int, held: float, later: float, l2_bytes: int
    ) -> tuple[float, float]:
        """Send a memory instruction down the shared pipe: when its result is there, when its operands are read."""
        path = self.path
        address = max(self.address_free[s], now)
        self.address_free[s] = address + path.address_cycles
        start = max(address + QUEUE_TO_PIPE, self.shared_free)
        if kind == LOAD:
            done = start + held + path.shared_latency - OPERANDS_READ + later
        elif kind == COPY:
            self.l2_free = max(self.l2_free, start) + l2_bytes / self.l2_rate
            self.copied[w] = max(self.copied[w], self.l2_free + self.l2_latency)
            done = start + QUEUED
        elif kind == READ:
            self.l2_free = max(self.l2_free, start) + l2_bytes / self.l2_rate
            done = self.l2_free + self.l2_latency
        elif kind == REDUCE:
            start = max(start, self.l2_free - path.reduction_backlog)
            self.l2_free = max(self.l2_free, start) + l2_bytes / path.reduction_bytes_per_clock
            done = start + QUEUED
        else:
            done = start + held + STORED
        self.shared_free = start + held
        queue = self.queue[s]
        del queue[0]
        queue.append(start + 1)
        return done, start + OPERANDS_READ

    def _arrive(self, s: int, w: int, now: float, may: float) -> None:
        """Hold a warp at its block's barrier; the last to arrive opens it for all."""
        block = w // self.warps_of_a_block
        self.arrived[block] += 1
        self.ready_but_barred[w] = may
        self.ready[w] = NEVER
        if self.arrived[block] < self.warps_of_a_block:
            return
        self.arrived[block] = 0
        opens = now + self.path.barrier_cycles
        first = block * self.warps_of_a_block
        for x in range(first, first + self.warps_of_a_block):
            self.ready[x] = max(opens, self.ready_but_barred[x])
        for other in range(SUB_PARTITIONS):
            if other != s:
                self._choose(other, self.issued[other] + 1)


def _priorities(count: int, greedy: bool) -> list[list[int]]:
    """For each warp: the order in which its sub-partition looks for the next issue after that warp's."""
    orders = []
    for w in range(count):
        mates = list(range(w % SUB_PARTITIONS, count, SUB_PARTITIONS))
        after = mates.index(w) + 1
        orders.append([w, *reversed(mates)] if greedy else mates[after:] + mates[:after])
    return orders


def mean_iteration(starts: Sequence[Sequence[float]]) -> float:
    """Cycles of one iteration of a warp, from what all warps finished in the last 75% of the time in which all run.

    Not the mean over warps: a favoured warp finishes early and the others then run with less company.
    """
    end = min(s[-1] for s in starts)
    begin = max(s[0] for s in starts)
    if begin >= end:  # some warp finished before another began: no time in which all run
        return sum((s[-1] - s[0]) / (len(s) - 1) for s in starts) / len(starts)
    begin += 0.25 * (end - begin)
    finished = sum(_iterations_at(s, end) - _iterations_at(s, begin) for s in starts)
    return len(starts) * (end - begin) / finished


def _iterations_at(starts: Sequence[float], time: float) -> float:
    """How many iterations (a fraction too) a warp has done at a time."""
    for k in range(len(starts) - 1):
        if starts[k + 1] >= time:
            return k + (time - starts[k]) / (starts[k + 1] - starts[k])
    return len(starts) - 1.0


def simulate(steps: Sequence[Step], trips: int, warps: int, begins: Sequence[float], board: Board) -> list[list[float]]:
    """Start times of the iterations of every warp, for blocks that start at the cycles `begins`."""
    return Multiprocessor(steps, trips, warps, begins, board).run()
