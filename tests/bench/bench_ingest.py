"""What receiving and decoding costs, every number beside its target: ``python -m tests.bench.bench_ingest``."""

from __future__ import annotations

from tests.bench.decode_cost import measure

DECODE_TARGETS_US = {100: 2.1, 1000: 1.05, 5000: 1.13}


def main():
    print("decode, CPU us per step (median of 9)")
    print(f"{'steps/call':>10} {'columnar':>9} {'target':>7} {'plain':>7} {'dict':>7} {'dict/columnar':>14}")
    for steps, target_us in DECODE_TARGETS_US.items():
        cost = measure(steps)
        ratio = cost["dict"] / cost["columnar"]
        print(
            f"{steps:>10} {cost['columnar']:>9.2f} {'<= ' + str(target_us):>7} {cost['plain']:>7.1f} "
            f"{cost['dict']:>7.1f} {ratio:>13.1f}x"
        )


if __name__ == "__main__":
    main()
