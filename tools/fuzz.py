"""Check random problems with random tiles on the emulator; print the command that repeats each one that is wrong.

python tools/fuzz.py [--count 300] [--seed 0]: cases seed .. seed + count - 1. Exit code 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context

from flashsmith import fuzz
from flashsmith.workers import cores


def reason(seed: int) -> str:
    """What is wrong with a case; empty if nothing is."""
    case = fuzz.draw(seed)
    try:
        return fuzz.run(case).reason
    except Exception as error:  # whatever a kernel does to the emulator is the finding
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def main() -> int:
    """Run the cases, as many at once as there are cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    start, wrong = time.monotonic(), 0
    with ProcessPoolExecutor(cores(), mp_context=get_context("spawn")) as pool:
        running = {pool.submit(reason, seed): seed for seed in range(args.seed, args.seed + args.count)}
        for done, future in enumerate(as_completed(running), 1):
            if future.result():
                wrong += 1
                print(f"{fuzz.draw(running[future]).command}\n  {future.result()}", flush=True)
            if done % 25 == 0:
                print(f"{done} of {args.count}, {wrong} wrong", file=sys.stderr)
    print(f"{args.count} cases from seed {args.seed}, {wrong} wrong, {time.monotonic() - start:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
