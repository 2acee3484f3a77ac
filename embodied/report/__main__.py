"""Write a page of a run: ``python -m embodied.report run=<run dir> [key=value ...]``

  run=<run dir>        a running, a finished or a killed run
  runs=[<dir>,<dir>]   several side by side; runs that differ only in the seed are one curve, with a t interval
  videos=true|false    film six episodes of the final evaluation, failures too; default: where they can be rendered
  out=<file>           default <run dir>/page.html, of several runs page.html beside the first one

The page is one HTML file that loads nothing: whether the run learned, how sure and how fast, commands to go on; success
over steps and time, staleness and waits, speed, videos, results, the certificate, what differs from the defaults.

Last line of stdout: {"page", "runs", "videos", "bytes"}.
"""

import sys
from dataclasses import field
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from embodied.core.errors import UserError
from embodied.core.options import Text, config_dataclass
from embodied.report.curves import SUCCESS
from embodied.report.page import Film
from embodied.session.command import command
from embodied.session.config import read_acting
from embodied.session.files import read_json
from embodied.session.results.page import write_page

FILMS = 6  # at most
MOST_BYTES = 3_500_000  # of all films: a third more in the page


@config_dataclass
class ReportConfig:
    run: Text | None = None
    runs: list[str] = field(default_factory=list)
    videos: bool | None = None
    out: Text | None = None


@command(first="run")
def main(options: ReportConfig) -> dict[str, Any]:
    """Write a page; return the command's result. UserError for bad input."""
    names = [*dict.fromkeys(([] if options.run is None else [options.run]) + options.runs)]
    if not names:
        raise UserError("run is missing: give run=<run directory>, or several as runs=[<directory>,<directory>]")
    if options.out is not None and Path(options.out).is_dir():
        raise UserError(f"out={options.out} is a directory: give a file, such as {Path(options.out) / 'page.html'}")
    run_dirs, films = [Path(name) for name in names], list[Film]()
    path = write_page(run_dirs, None if options.out is None else Path(options.out))  # refuses before it films
    for run_dir in run_dirs[:FILMS] if options.videos is not False else ():
        try:
            films += film(run_dir, max(1, FILMS // len(run_dirs)))
        except UserError as error:
            if options.videos:
                raise
            print(f"{run_dir} is not filmed: {error}", file=sys.stderr)
    if films:
        sizes = accumulate(len(film.mp4) for film in films)
        films = [film for film, size in zip(films, sizes, strict=True) if size <= MOST_BYTES]
        write_page(run_dirs, path, films)
    return {"page": str(path), "runs": names, "videos": len(films), "bytes": path.stat().st_size}


def film(run_dir: Path, most: int) -> list[Film]:
    """Film episodes of the final evaluation of the last checkpoint, half of them failures if there are as many.

    UserError for a run without such an evaluation, or whose environments cannot be rendered.
    """
    config = read_acting(run_dir, "auto")
    from embodied.report.video import record  # import torch
    from embodied.session import factories
    from embodied.session.kept_episodes import read_episodes
    from embodied.session.results.filming import filming

    found = factories.load_checkpoint(run_dir, "last")
    policy = factories.load_policy(config, found).to(factories.acting_device(config))
    path, noise = run_dir / "eval" / f"final_{found.env_steps}.json", config.runtime.eval_noise
    number = read_json(path).get("episodes")
    if number is None:
        raise UserError(f"it has no final evaluation of {found.path.name}, whose episodes could be filmed")
    solved_M = [row.get(SUCCESS, True) for row in read_episodes(path, number)]
    plans = factories.evaluation_plans(factories.make_spec(config), number, config.seed)
    failures, successes = ([i for i in range(number) if solved_M[i] == solved] for solved in (False, True))
    failures = failures[: max(most // 2, most - len(successes))]
    chosen = successes[: most - len(failures)] + failures
    print(f"filming {len(chosen)} episodes of {run_dir}; videos=false leaves them out", file=sys.stderr)
    with TemporaryDirectory() as folder, filming(config, len(chosen), quickly=True) as filmed:
        paths = [Path(folder) / f"{i}.mp4" for i in chosen]
        solved_N = record(*filmed, policy, plans.rows(np.array(chosen)), paths, seeded=noise == "seeded")
        shown = zip(paths, solved_N, chosen, strict=True)
        return [Film(path.read_bytes(), solved, f"{run_dir}, episode {i}") for path, solved, i in shown]


if __name__ == "__main__":
    sys.exit(main())
