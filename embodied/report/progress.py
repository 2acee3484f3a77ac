"""Progress line on stderr, of a training or an evaluation: rate, success, time left."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from embodied.core.clock import running_s
from embodied.report.metrics import evaluated_success, steps_of

PLAIN_INTERVAL_S = 5.0


class Line:
    """Live line on a terminal; elsewhere a plain line at most every ``PLAIN_INTERVAL_S`` seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._console = Console(file=stream or sys.stderr, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._last_plain_s = -float("inf")
        if self._console.is_terminal:
            self._live = Live(Text("starting"), console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def show(self, text: str) -> None:
        if self._live is not None:
            self._live.update(Text(text))
        elif time.monotonic() - self._last_plain_s >= PLAIN_INTERVAL_S:
            self._last_plain_s = time.monotonic()
            self.message(text)

    def evaluating(self, size: str, done: str = "evaluated") -> Callable[[float], None]:
        """Begin an evaluation; return a function that shows the fraction done. size, done: texts of the line."""
        began_s = running_s()
        self._last_plain_s = time.monotonic()  # a short one needs no line

        def watch(share: float) -> None:
            gone_s = running_s() - began_s
            left_s = gone_s * (1 - share) / share if share > 0 else None
            self.show(f"{share:4.0%}  of {size} {done}  {duration(gone_s)} gone  {duration(left_s)} left")

        return watch

    def message(self, text: str) -> None:
        """Print a line of its own (above the live line)."""
        self._console.print(Text(text))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


class Progress(Line):
    """The line of a training.

    total_steps, max_minutes: where training ends, whichever comes first; max_minutes None is no limit. has_success:
    whether the task reports success; otherwise returns are shown.
    """

    def __init__(
        self, total_steps: int, max_minutes: float | None, has_success: bool = True, stream: TextIO | None = None
    ) -> None:
        super().__init__(stream)
        self._total_steps, self._has_success = total_steps, has_success
        self._max_s = None if max_minutes is None else 60.0 * max_minutes

    def update(self, row: Mapping[str, float]) -> None:
        """Show the newest metrics. Imitation and grounding count updates as steps, and show their validation loss."""
        steps, wall_s = steps_of(row), row["wall_s"]
        loss, unit = row.get("train/validation_loss"), "steps"
        rate = row.get("perf/env_steps_per_s", row.get("perf/updates_per_s", 0.0))
        if loss is not None:
            unit, quality = "updates", f"validation loss {loss:.4f}"
        elif self._has_success:
            success = percent(row.get("rollout/success_at_end"))
            quality = f"success {success}  evaluated {percent(evaluated_success(row))}"
        else:
            returns = [row.get(f"{kind}/return_mean") for kind in ("rollout", "eval")]
            quality = "return {}  evaluated {}".format(*("-" if mean is None else f"{mean:.1f}" for mean in returns))
        done = share_done(steps, self._total_steps, wall_s, self._max_s)
        left_s = time_left(steps, self._total_steps, rate, wall_s, self._max_s)
        self.show(
            f"{percent(done):>4}  {count(steps)} of {count(self._total_steps)} {unit}  "
            f"{f'{rate:.1f}' if rate < 10 else count(rate)} {unit}/s  {quality}  "
            f"{duration(wall_s)} gone  {duration(left_s)} left"
        )


def success_text(rates: Mapping[str, Any]) -> str:
    """Describe the success of an evaluation: ``91.0% (86.2% to 94.2%) of 200 episodes``."""
    low, high = rates["success_at_end_ci95"]
    return f"{rates['success_at_end']:.1%} ({low:.1%} to {high:.1%}) of {rates['episodes']} episodes"


def share_done(steps: int, total_steps: int | None, wall_s: float, max_s: float | None) -> float | None:
    """Return the share of a training that is done, at most 1, by the limit that comes first; None without a limit."""
    shares = ([steps / total_steps] if total_steps else []) + ([wall_s / max_s] if max_s else [])
    return min(1.0, max(shares)) if shares else None


def time_left(
    steps: int, total_steps: int | None, steps_per_s: float | None, wall_s: float, max_s: float | None
) -> float | None:
    """Return the seconds to the first limit at the present rate; None without a limit or rate."""
    limits = [max(0, total_steps - steps) / steps_per_s] if total_steps and steps_per_s else []
    limits += [max(0.0, max_s - wall_s)] if max_s else []
    return min(limits) if limits else None


def duration(seconds: float | None) -> str:
    """Format seconds: ``75`` → "1m15s", ``3700`` → "1h01m", None → "?"."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def count(number: float) -> str:
    """Format a number: ``2500`` → "2.5k"."""
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{unit}"
    return f"{number:.0f}"


def percent(rate: float | None) -> str:
    """Format a share: ``0.25`` → "25%", None → "-"."""
    return "-" if rate is None else f"{rate:.0%}"
