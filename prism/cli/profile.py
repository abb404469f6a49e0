"""``prism profile``"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from prism.cli import output
from prism.config.state import DEFAULT_STATE_DIR, StateDir

if TYPE_CHECKING:
    from prism.config.profiles import Profile
    from prism.core.specs import ModelSpec

F = TypeVar("F", bound=Callable[..., Any])
_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def profile_options(command: F) -> F:
    """What a profile depends on beside the model: the same options wherever one is used."""
    options = (
        click.option("--gpu", default="H100", show_default=True, help="Kind of device (`prism sim gpus` lists them)."),
        click.option(
            "--lengths", default="sharegpt", show_default=True, help="Lengths of the requests: a known table."
        ),
        click.option(
            "--target", type=float, default=0.99, show_default=True, help="Share that must meet both objectives."
        ),
        click.option("--calibration", type=_FILE, help="Measured step times instead of the roofline."),
        click.option("--state-dir", envvar="PRISM_STATE_DIR", default=DEFAULT_STATE_DIR, show_default=True),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("catalog", type=_FILE)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@profile_options
@output.json_option
def command(catalog: Path, models: tuple[str, ...], as_json: bool, **question: Any) -> None:
    """Find what models of CATALOG can carry on devices of their own, and what memory they leave or lack there.

    For each (all without MODEL): the largest rate at which its objectives are met, what is free of a device's memory
    at that rate, and what the requests of a burst of 2, 3 and 5 times that rate hold beyond the memory. Simulated on
    modelled devices; the answers are kept in the state directory, where `prism place` finds them, and where a server
    that starts there finds what times of decode steps and prefills to begin with, and how much memory to keep back for
    bursts when it lends.
    """
    from prism.config.catalog import load_catalog
    from prism.sim.models import catalog_specs

    loaded = load_catalog(catalog)
    chosen = {loaded.model(name).name for name in models}
    specs = [spec for spec in catalog_specs(loaded) if not models or spec.name in chosen]
    found = profiles_of(specs, anew=True, **question)
    if as_json:
        import msgspec

        output.print_json(msgspec.to_builtins(found, str_keys=True))
        return
    output.print_table(COLUMNS, [_row(profile) for profile in found], "the catalog has no models")


COLUMNS = ("MODEL", "GPUS>", "RATE>", "FREE>", "SWAP 2X>", "SWAP 3X>?1", "SWAP 5X>?2")


def _row(profile: Profile) -> list[str]:
    swaps = [output.size(nbytes) for _, nbytes in sorted(profile.swap_bytes.items())]
    return [profile.model, str(profile.tp), f"{profile.rate_rps:g}/s", output.size(profile.free_bytes), *swaps]


def profiles_of(
    specs: Sequence[ModelSpec],
    gpu: str,
    lengths: str,
    target: float,
    calibration: Path | None,
    state_dir: str,
    anew: bool = False,
) -> list[Profile]:
    """The profile of each model, from the state directory where it stands there (not with ``anew``), else made now.
    Equal models (weights, shape, objectives) are profiled once."""
    from prism.cli.sim_output import ProgressLine
    from prism.config.profiles import ProfileStore
    from prism.sim.calibration import load_calibration
    from prism.sim.profile import ProfileSpec, profile

    store = ProfileStore(StateDir.at(state_dir).profiles)
    table = None if calibration is None else load_calibration(calibration)
    made: dict[tuple[object, ...], Profile] = {}
    found: list[Profile] = []
    with ProgressLine() as line:
        for spec in specs:
            known = None if anew else store.find(spec, gpu, lengths, target)
            if known is None:
                alike = (spec.path, spec.weight_bytes, spec.shape, spec.tp, spec.slo_ttft_s, spec.slo_tpot_s)
                if alike not in made:
                    asked = ProfileSpec(spec, gpu, lengths, target, calibration=table)
                    made[alike] = profile(asked, lambda rate_rps, name=spec.name: line.rate(name, rate_rps))  # type: ignore[misc]
                known = made[alike].of(str(spec.name))
                store.put(known)
            found.append(known)
    return found
