"""Defaults that follow from a task: what a run on an environment of another simulator uses where nothing is said.

words ──► compose ──► refuses what is mistyped before a simulator is imported
task  ──► EnvSpec ──► derive ──► settings, and lines that say why ──► compose again, below the words

They depend on the spec and on the words alone, so that a command and a seed train the same everywhere
(docs/defaults.md). Tasks on our simulators have the defaults of configs/train.yaml and of the policy's file, but end at
a success, and have more envs where a GPU simulates them; a task with a recipe has that.
"""

from collections.abc import Callable, Mapping
from math import ceil, sqrt
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from embodied.algos.config import PPOConfig
from embodied.algos.registry import ALGORITHMS
from embodied.core.config import nest
from embodied.core.errors import NeedsCameras
from embodied.core.spec import Box, CameraSpec, EnvSpec
from embodied.envs.registry import DEFAULT_FAMILY, FAMILIES, split_name
from embodied.policies.config import POLICIES, PixelConfig
from embodied.session.config import CONFIG_DIR, RunConfig, compose_run, expand, read_run

NUM_ENVS = 8
CHUNK = 4  # actions of a chunk, where policies have some
OF_CHUNKS = {"policy.sigma_init": 0.25, "runtime.decisions": 8, "algo.epochs": 5}
"""Of a flow policy from scratch that is told to plan chunks of actions."""
SOLVED = 0.99  # success at which training ends
SIZES = ("policy.horizon", "policy.execute")
PLANS_CHUNKS = {
    ("flow", "ppo"), ("flow", "grpo"), ("flow", "sft"),
    ("vla_tiny", "ppo"), ("vla_tiny", "grpo"), ("vla_tiny", "sft"), ("vla_tiny", "grounding"),
}  # fmt: skip
"""Policy and algorithm of new runs where one of ``SIZES`` alone says the other."""
ON_GPU = {
    "num_envs": 4096, "runtime.decisions": 4, "algo.epochs": 5,
    "algo.num_minibatches": 4, "algo.max_learning_rate": 1e-2, "algo.desired_kl": 0.03, "cut_after_success": 0,
    "repeat_failures": 0.0,
}  # fmt: skip
"""Of PPO on our own tasks where a GPU simulates: fewer envs take as long a step (docs/gpu.md)."""
TAKEN_FROM_INIT = ("denoise_steps", "horizon", "execute", "cameras", "image_size")  # options of its policy
SIZES_AFTER_INIT = {
    "flow": {"runtime.decisions": 32, "algo.num_minibatches": 16},
    "vla_tiny": {"runtime.decisions": 32, "algo.num_minibatches": 16},
    "dsrl": {"runtime.decisions": 16},
}
"""Of PPO with single actions, by policy; with chunks of E actions an E-th, so that a rollout has as many steps."""
BATCH, MINIBATCH, EPOCHS, RATE = 2048, 128, 10, 3e-4
IMAGE_BATCH, IMAGE_MINIBATCH, IMAGE_EPOCHS, IMAGE_RATE = 1024, 256, 4, 2.5e-4
HORIZONS = 10  # horizons of the discount in an episode as long as its time limit
SHORTEST, LONGEST = 20, 100  # control steps of a horizon
DRAWS = 32  # times that noise which is held is drawn in such an episode
STDS = {
    "gaussian": ("policy.init_std", "policy.max_std"), "flow": ("policy.sigma_init", "policy.sigma_max"),
}  # fmt: skip
"""Options of a policy for its first and its largest standard deviation."""
INIT_STD, LOUDEST = 0.95, 3  # as a share of the largest, up to so many actions: more share its length
QUIETEST = 0.25  # of INIT_STD, for many actions
FINAL_RATE = 0.05  # at the end, steps of the same size would follow noise
SLOWEST = 1 / 3  # of the learning rate, where the schedule may lower it
WRITTEN = {"None": "null", "True": "true"}  # on the command line
TOTAL_STEPS = 1_000_000
EVALUATED, FINALLY_EVALUATED, FEWEST = 20, 200, 5  # most episodes of an evaluation, and fewest of the final one
ONE_SHARE, FINAL_SHARE, ALL_SHARE = 0.02, 0.05, 0.1  # of one evaluation, the final one and all, in the control steps


def compose_new(words: Mapping[str, Any], tell: Callable[[str], None] = lambda line: None) -> RunConfig:
    """Compose the configuration of a new run like ``compose_run``, with the defaults that follow from its task.

    tell: gets the lines that say what was derived.
    """
    words = _with_options_of_init(expand(words))
    task, algo = str(words.get("task", "")), str(words.get("algo", "ppo"))
    foreign = "/" in task and split_name(task)[0] != DEFAULT_FAMILY
    if not foreign:
        return _compose_own(words, tell)
    flow = words.get("policy") == "flow"  # it is no task's default there
    words = {"repeat_failures": 0.0, **words}  # a default of policies on our tasks, which know success
    if words.get("init") is not None or ALGORITHMS[algo].config is not PPOConfig:
        return compose_run(_with_chunks(words))
    # gaussian has all options of the policies that are chosen below
    config = compose_run(_with_chunks(words) if flow else {"policy": "gaussian", **words})
    if not flow and not isinstance(config.policy.options, PixelConfig):
        tell(f"policy={config.policy.name} → the defaults of our arm, in configs/train.yaml")
        return compose_run(words)
    spec = spec_of(config, chosen="policy.cameras" in words)
    policy = str(words.get("policy", "gaussian" if isinstance(spec.action, Box) else "categorical"))
    chosen = {"policy": policy, **words}
    if f"{policy}-{algo}" in recipes_of(task):
        tell(f"task={task} → policy={policy}, with the settings of configs/task/{task}.yaml")
        return config if flow else compose_run(chosen)
    settings, lines = derive(spec, policy, words)
    for line in lines:
        tell(line)
    return compose_run(chosen, settings)


def _compose_own(words: Mapping[str, Any], tell: Callable[[str], None]) -> RunConfig:
    """Compose the configuration of a new run on a task of ours, also of one in a user's file."""
    algo = str(words.get("algo", "ppo"))
    explores = algo in ALGORITHMS.names() and issubclass(ALGORITHMS[algo].config, PPOConfig)
    ends = {"stop_at_success": SOLVED} if explores else {}
    config = compose_run(_with_chunks(words), ends)
    given = {"num_envs", "init", "data"} & words.keys()
    fits = explores and config.group_size == 1  # the preset has options of PPO, and parts of episodes
    if config.sim.name != "warp" or given or not fits or config.policy.options.observed_cameras:
        return config
    from embodied.core.device import means_cuda  # imports torch

    simulates_on = config.sim.options.device
    if not means_cuda(config.runtime.device if simulates_on == "auto" else simulates_on):
        return config
    chunked = _with_chunks({"policy.horizon": CHUNK, **words}) if config.policy.name == "flow" else words
    settings = {key: value for key, value in chunked.items() if key not in words} | ON_GPU
    tell(f"sim=warp on a GPU → {_written(settings, words)}")
    return compose_run({**chunked, **ON_GPU, **words}, ends)


def _with_options_of_init(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words with the policy that training starts from, and those of its options that its weights fit.

    For PPO also with sizes of rollouts and minibatches that fit its chunks.
    """
    if words.get("init") is None:
        return dict(words)
    source = read_run(Path(str(words["init"]))).policy
    policy = str(words.get("policy", source.name))
    own = POLICIES[policy].config.__dataclass_fields__
    both = [name for name in TAKEN_FROM_INIT if name in own and hasattr(source.options, name)]
    options = {f"policy.{name}": getattr(source.options, name) for name in both}
    derived = {"policy": policy} | {key: list(x) if isinstance(x, tuple) else x for key, x in options.items()}
    execute = words.get("policy.execute", source.options.execute)
    if words.get("algo", "ppo") == "ppo" and isinstance(execute, int) and execute > 0:
        sizes = SIZES_AFTER_INIT.get(policy, {})
        derived |= {key: max(1, number // execute) for key, number in sizes.items()}
    return {**derived, **words}


def _with_chunks(words: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words with what belongs to chunks, if a new policy of ``PLANS_CHUNKS`` is told to plan some."""
    kind, given = (words.get("policy", "flow"), words.get("algo", "ppo")), [words[x] for x in SIZES if x in words]
    new = words.get("init") is None and kind in PLANS_CHUNKS
    if not new or not given or not all(isinstance(number, int) for number in given):
        return dict(words)
    horizon = words.get("policy.horizon", max(CHUNK, *given))
    execute, chunks = min(CHUNK, horizon), OF_CHUNKS if kind == ("flow", "ppo") and horizon > 1 else {}
    return {"policy.horizon": horizon, "policy.execute": execute, **chunks, **words}


def spec_of(config: RunConfig, chosen: bool = False) -> EnvSpec:
    """Return the spec of the task with the cameras of the policy, or with all images that the task observes itself."""
    family, id = split_name(config.task.name)
    build, options = FAMILIES[family].build().spec, config.policy.options
    try:
        spec = build(id, config.task.options, options.observed_cameras)
        images = spec.images if isinstance(options, PixelConfig) and not chosen else ()
    except NeedsCameras as needed:
        if not isinstance(options, PixelConfig):
            raise
        images = needed.cameras
    cameras = [CameraSpec.square(name, options.image_size) for name in images]
    return build(id, config.task.options, cameras) if cameras else spec


def recipes_of(task: str) -> Mapping[str, Any]:
    """Return the ``tuned`` settings in a task's file by ``<policy>-<algo>``; none if it has no file."""
    path = CONFIG_DIR / "task" / f"{task}.yaml"
    file: Any = OmegaConf.load(path) if path.is_file() else {}
    recipes: Mapping[str, Any] = file.get("tuned", {})
    return recipes


def derive(spec: EnvSpec, policy: str, words: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return nested settings of PPO for a task, and three lines that say what they follow from.

    words: the given options. What belongs to a given size fits it; what is given itself is in no line.
    """
    limit, images = spec.max_episode_steps, [camera.name for camera in spec.cameras]
    sizes = (IMAGE_BATCH, IMAGE_MINIBATCH, IMAGE_EPOCHS, IMAGE_RATE) if images else (BATCH, MINIBATCH, EPOCHS, RATE)
    batch, minibatch, epochs, rate = sizes
    rate = words.get("algo.learning_rate", words.get("algo.max_learning_rate", rate))
    execute, num_envs = words.get("policy.execute", 1), words.get("num_envs", NUM_ENVS)
    decisions = words.get("runtime.decisions") or max(1, batch // num_envs)
    longest = min(EVALUATED, max(1, int(ONE_SHARE * TOTAL_STEPS / limit)))
    evaluated = words.get("runtime.eval_episodes", longest)
    horizon = min(max(limit / HORIZONS, SHORTEST), LONGEST)
    acting = {"policy": policy, "policy.horizon": execute, "policy.execute": 1}
    if policy in STDS:
        first, largest = STDS[policy]
        share = max(QUIETEST, min(1.0, sqrt(LOUDEST / spec.action.size)))
        acting[first] = round(INIT_STD * share * words.get(largest, 1.0), 4)
        acting["runtime.noise_hold"] = max(1, limit // (DRAWS * execute))
    if policy == "flow":
        acting |= {"policy.head_hidden": [64], "cut_after_success": 0}
    if images:
        acting |= {"policy.cameras": images, "algo.entropy_coef": 0.01}
    else:
        acting |= {"policy.activation": "tanh", "policy.actor_hidden": [64, 64], "policy.critic_hidden": [64, 64]}
    timing = {
        "algo.gamma": round(1 - 1 / horizon, 4), "algo.gae_lambda": 0.95,
        "runtime.eval_every": ceil(evaluated * limit / (ALL_SHARE * num_envs * decisions * execute)),
        "runtime.eval_episodes": evaluated,
        "eval_episodes": min(FINALLY_EVALUATED, max(FEWEST, int(FINAL_SHARE * TOTAL_STEPS / limit))),
    }  # fmt: skip
    learning = {
        "policy.scale_values": True, "num_envs": num_envs, "runtime.decisions": decisions, "runtime.max_staleness": 0,
        "algo.epochs": epochs, "algo.num_minibatches": max(1, num_envs * decisions // minibatch),
        "algo.learning_rate": rate, "algo.final_rate": FINAL_RATE, "algo.critic_learning_rate": None,
        "algo.max_grad_norm": 0.5,
        "total_steps": TOTAL_STEPS, "max_minutes": None,  # rates fall until then, however slow the simulator is
    }  # fmt: skip
    if images or not rate:
        learning["algo.schedule"] = "fixed"
    else:  # a policy that has learned much is narrow: as many steps of the same size would change it too much
        learning |= {"algo.min_learning_rate": float(f"{SLOWEST * rate:.2g}"), "algo.max_learning_rate": rate}
    facts = {
        f"continuous actions ({spec.action.size})" if isinstance(spec.action, Box) else "choices": acting,
        f"time limit {limit:,} control steps{_assumed(spec, 'max_episode_steps')} of {spec.control_dt_s:g} s"
        f"{_assumed(spec, 'control_dt_s')}": timing,
        "rewards of unknown size, a simulator of unknown speed": learning,
    }
    lines = [f"{fact} → {_written(settings, words)}" for fact, settings in facts.items()]
    del acting["policy"]  # a name, which the section is chosen by
    return nest({**acting, **timing, **learning}), lines


def _assumed(spec: EnvSpec, field: str) -> str:
    return " (assumed, as it states none)" if field in spec.assumed else ""


def _written(settings: Mapping[str, Any], words: Mapping[str, Any]) -> str:
    """Return the settings that are not given, as words of the command line."""
    values = {key: value for key, value in settings.items() if key not in words}
    texts = [f"{key}={WRITTEN.get(str(value), str(value).replace(' ', ''))}" for key, value in values.items()]
    return " ".join(texts) or "nothing, all is given"
