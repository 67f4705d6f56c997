"""Numbers beside their targets, as every bench prints them."""

from __future__ import annotations


class Board:
    """Prints each number as it comes, and remembers those that missed their targets.

    Attributes:
        missed: their names.
        figures: numbers for docs/figures.json; ``[number, target]`` where there is one.
    """

    def __init__(self) -> None:
        self.missed: list[str] = []
        self.figures: dict[str, float | list[float]] = {}

    def line(self, name: str, value: object, target: str = "", good: bool | None = None, note: str = "") -> None:
        """One number; ``good`` is None where it has no target."""
        if good is False:
            self.missed.append(name)
        mark = {True: "ok", False: "MISSED", None: ""}[good]
        print(f"{mark:<7}{name:<78} {value!s:>12}  {target:<16} {note}".rstrip(), flush=True)

    def at_most(self, name: str, value: float, limit: float, unit: str = "", note: str = "") -> None:
        """A number that may not be above its target."""
        self.figures[name] = [value, limit]
        self.line(name, f"{value:.2f}{unit}", f"<= {limit:g}{unit}", bool(value <= limit), note)

    def keep(self, name: str, value: float) -> None:
        """A number without a target."""
        self.figures[name] = value
        self.line(name, f"{value:.2f}")

    def skip(self, name: str, needs: str) -> None:
        """Loudly: nothing was measured."""
        self.line(name, "SKIPPED", note=f"needs {needs}")

    def end(self) -> int:
        """Say what missed; the exit status."""
        print(f"missed: {', '.join(self.missed) or 'nothing'}")
        return 1 if self.missed else 0
