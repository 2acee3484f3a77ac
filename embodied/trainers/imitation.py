"""Imitation of demonstrations; unless the policy was grounded, without a simulator until the final evaluation.

Demonstrations ── split by episode ──► train chunks ──► SFT.update ──► average weights ──► validation loss
                                  └──► validation chunks ───│──────────────┘
                                           SceneDataset ────┘  only for a policy that was grounded

A grounded policy also trains on scenes: from a few demonstrations alone it would unlearn its localization. Success
keeps growing long after the validation loss has its minimum (docs/flow_rl.md).
"""

from contextlib import suppress
from functools import cached_property
from pathlib import Path

from torch import Tensor

from embodied.algos.supervised import SFT
from embodied.core.errors import UserError
from embodied.core.spec import CameraSpec, EnvSpec
from embodied.core.types import Obs
from embodied.data import Demonstrations, read
from embodied.data.lerobot import cameras_of, check_fits, check_sizes
from embodied.policies.config import CameraConfig, PixelConfig
from embodied.session import factories
from embodied.session.config import RunConfig
from embodied.trainers.scenes import SceneDataset
from embodied.trainers.supervised import SupervisedTrainer

VALIDATION_CHUNKS = 256  # most chunks to validate on, spread evenly over the validation episodes
CAPACITY = 8192  # observations of scenes to draw from
REUSE = 4.0  # how often an observation of a scene is drawn, on average


class ImitationTrainer(SupervisedTrainer):
    """Train on the chunks of a data set, split by episode. UserError if the data do not fit task and policy.

    A resumed run learns from the same chunks as an uninterrupted one, but sees other scenes, if any.
    """

    needs_data = True
    loss_name = "train/imitation_loss"
    algorithm: SFT

    def __init__(self, config: RunConfig, run_dir: Path, new: bool) -> None:
        spec = factories.make_spec(config)
        self.data, self.doubts = read_demonstrations(config, spec)
        super().__init__(config, run_dir, new, spec)
        self.patience = self.algorithm.config.patience
        self.train_episodes, self.validation_episodes = self.data.split(self.algorithm.config.validation_share)
        self.frames = self.data.frames(self.train_episodes)
        frames = self.data.frames(self.validation_episodes)
        self.validation_frames = frames[:: -(-len(frames) // VALIDATION_CHUNKS)]
        if new and config.init is None:
            self.algorithm.fit_normalizer({"state": self.data.state_FS[self.frames]})

    def announcement(self) -> str:
        plan = (
            f"imitating {self.config.task.title}: policy {self.config.policy.name} ({self.parameters()}), "
            f"{len(self.train_episodes)} episodes to train on ({len(self.frames):,} chunks), "
            f"{len(self.validation_episodes)} to validate on, seed {self.config.seed} → {self.run_dir}"
        )
        return "\n".join([*self.doubts, plan])

    def update(self) -> float:
        algorithm = self.algorithm
        rows_B = algorithm.pick(self.frames)
        scenes = self.scenes.draw(len(rows_B), algorithm.generator) if algorithm.keeps_grounding else None
        return algorithm.update(*self.chunks(rows_B), scenes)

    def validate(self) -> tuple[float, dict[str, float]]:
        return self.algorithm.validate(*self.chunks(self.validation_frames)), {}

    def chunks(self, rows_B: Tensor) -> tuple[Obs, Tensor, Tensor]:
        """Return the observations of frames ``rows``, and the chunks that start there with their mask."""
        obs = {key: value[rows_B] for key, value in self.observed.items()}
        return obs, *self.data.chunks(rows_B, self.policy.horizon)

    @cached_property
    def scenes(self) -> SceneDataset:
        """Scenes for a policy that keeps its grounding; opened at the first update, as ``observed`` is."""
        keep = self.policy.precompute if self.policy.fits_cache(CAPACITY) else lambda obs: obs
        return self.open_scenes(masks=False, capacity=CAPACITY, reuse=REUSE, keep=keep)

    @cached_property
    def observed(self) -> Obs:
        """Observations of all frames, precomputed at the first update, after a resumed run has loaded its weights."""
        obs = self.data.obs(slice(None))
        return self.policy.precompute(obs) if self.policy.fits_cache(len(self.data.state_FS)) else obs


def read_demonstrations(config: RunConfig, spec: EnvSpec) -> tuple[Demonstrations, list[str]]:
    """Read the run's data set, with lines of what may differ from the task. UserError unless it fits the task."""
    assert config.data is not None
    path = Path(config.data)
    check_sizes(path, spec, config.data_keys)
    data = read(path, config.data_keys, [camera.name for camera in spec.cameras])
    doubts = check_fits(data, spec, path, config.data_keys)
    if unused := unused_cameras(config, spec):
        doubts.append(f"{unused[0]}: {unused[1]}")
    if spec.cameras and spec.texts:  # policies with cameras read instructions
        option = "task.instruction" if hasattr(config.task.options, "instruction") else ""
        data = data.with_instructions(spec.texts, option)
    return data, doubts


def unused_cameras(config: RunConfig, spec: EnvSpec) -> tuple[str, str] | None:
    """Return which cameras of a data set with images the policy could observe but does not, and the option for it."""
    recorded, options = cameras_of(Path(str(config.data))), config.policy.options
    several_goals = isinstance(options, PixelConfig) and len(set(spec.goals)) > 1
    if not recorded or several_goals or not isinstance(options, CameraConfig):
        return None
    known = list[str]()
    for name in recorded:
        with suppress(UserError):  # the task lacks it
            factories.make_spec(config, [CameraSpec.square(name, options.image_size)])
            known.append(name)
    unused = [name for name in known or spec.images if name not in options.cameras]  # data_keys.images renames them
    if not unused:
        return None
    verb, them = ("is", "it") if len(unused) == 1 else ("are", "them")
    cure = f"policy.cameras=[{','.join((*options.cameras, *unused))}] uses {them}"
    return f"camera{'s' * (len(unused) > 1)} {', '.join(unused)} {verb} not used", cure
