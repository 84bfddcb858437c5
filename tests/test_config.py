"""Loading, overriding and refusing configs."""

import re
from pathlib import Path

import pytest
import yaml

from dancegrpo.config import (
    Config,
    ConfigError,
    counts_table,
    derive_counts,
    dump_yaml,
    load_config,
    shipped_configs,
)

ROOT = Path(__file__).resolve().parent.parent


def test_shipped_configs_load():
    assert "flux_small.yaml" in shipped_configs()
    for path in shipped_configs().values():
        load_config(path)


def test_flux_small_explains_every_key():
    text = shipped_configs()["flux_small.yaml"].read_text()
    there = {f"{section}.{key}" for section, values in yaml.safe_load(text).items() for key in values}
    assert there == {f"{section}.{key}" for section, values in Config().to_dict().items() for key in values}
    for before, line in zip(text.splitlines(), text.splitlines()[1:], strict=False):
        if re.match(r"  \w+:", line):
            assert re.match(r"  (#|\w+:)", before) or before.startswith("    "), f"no comment above {line!r}"


def test_dumped_config_is_the_same_config(tmp_path):
    overrides = [
        "train.learning_rate=3e-5",
        "data.prompts=-",
        "sampler.guidance_scale=3.5",
        "reward.terms=[{name: shapes_rule, weight: 2}, {name: 'mine.py:Mine', label: mine, depth: 3}]",
    ]
    config = load_config(None, overrides)
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert config.reward.terms[1].arguments == {"depth": 3}


def test_override_values():
    config = load_config(
        None,
        [
            "train.learning_rate=1e-4",
            "sampler.eta=1",
            "data.prompts=12",
            "train.seed=7",
            "reward.terms.0.weight=2",
            "sampler.guidance_scale=null",
        ],
    )
    assert config.train.learning_rate == 1e-4
    assert type(config.sampler.eta) is float
    assert config.data.prompts == "12"
    assert config.train.seed == 7
    assert config.reward.terms[0].weight == 2.0
    assert config.sampler.guidance_scale is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.candidate=3", "did you mean 'train.candidates'?"),
        ("trian.candidates=3", "did you mean 'train.candidates'?"),
        ("candidates=3", "did you mean 'train.candidates'?"),
        ("nonsense.nothing=1", "the sections are model, lora, sampler"),
        ("train.iterations", "must look like section.key=value"),
        ("train.candidates=many", "must be a whole number, got 'many' (a text)"),
        ("train.candidates=12.0", "must be a whole number, got 12.0 (a number)"),
        ("train.candidates=true", "must be a whole number, got True"),
        ("train.iterations=-1", "must be at least 1, got -1"),
        ("train.candidates=1", "must be at least 2, got 1"),
        ("train.learning_rate=.inf", "must be finite"),
        ("precision.compute=float23", "did you mean 'float32'? (valid: bfloat16, float16, float32)"),
        (
            "train.candidates=101",
            "1212 images do not divide by train.micro_batch = 48; nearest valid train.micro_batch: 12 or 101",
        ),
        ("train.updates_per_rollout=5", "nearest valid train.updates_per_rollout: 3 or 9"),
        ("train.timestep_fraction=0.1", "less than one step; use at least 0.2"),
        (
            "train.timestep_selection=random",
            "sampler.stochastic: trained needs train.timestep_selection: first",
        ),
        ("train.trained_prompts=0", "must be at least 1, got 0"),
        ("parallel.tensor=2", "not supported yet"),
        ("reward.terms=[]", "must not be empty"),
        ("reward.terms=clip_score", "is 'clip_score' (a text), but must be a list of at least one"),
        ("train.clip_range=2", "must be below 1, got 2; to give it in standard deviations"),
        ("reward.terms=[{weight: 1}]", "reward.terms.0 has no name"),
        ("reward.terms=[{name: a, label: a/b}]", "a label holds no slash"),
        ("reward.terms.3.weight=1", "INDEX below 1"),
    ],
)
def test_bad_override_is_named(override, message):
    overrides = [
        "data.prompts_per_iteration=12",
        "train.micro_batch=48",
        "sampler.num_steps=6",
        "train.timestep_fraction=0.6",
        "train.updates_per_rollout=1",
        "train.clip_unit=absolute",
        "train.clip_range=0.01",
        override,
    ]
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(None, overrides)
    assert str(caught.value).startswith("--set")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: {candidate: 3}", "unknown key 'train.candidate'; did you mean 'train.candidates'?"),
        ("trains: {candidates: 3}", "unknown section 'trains'; did you mean 'train'?"),
        ("train:\n  seed: 1\n  seed: 2", "line 3: the key 'seed' stands twice"),
        ("train: [1, 2", "not valid YAML"),
        ("train: 3", "train must hold keys with values, got 3"),
        ("- train", "must hold sections with keys, got a list"),
    ],
)
def test_bad_file_is_named(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        load_config(file)
    assert str(caught.value).startswith(str(file))


def test_counts_that_do_not_fit_are_blamed_on_who_set_them(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("train: {candidates: 101}")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["train.iterations=3"])
    assert str(caught.value).startswith(f"{file}: data.prompts_per_iteration * train.candidates")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["train.micro_batch=30"])
    assert str(caught.value).startswith(f"--set train.micro_batch=30 with {file}: ")
    assert load_config(None, ["train.clip_range=2", "train.clip_unit=spread"]).train.clip_range == 2


def test_missing_file_names_the_shipped_ones():
    with pytest.raises(
        ConfigError, match=r"flux_smal.yaml: no such config file; did you mean 'flux_small.yaml'"
    ):
        load_config("flux_smal.yaml")


def test_counts():
    config = load_config(
        None,
        [
            "data.prompts_per_iteration=8",
            "train.candidates=12",
            "train.micro_batch=48",
            "train.updates_per_rollout=2",
            "sampler.num_steps=11",
            "train.timestep_fraction=0.6",
        ],
    )
    counts = derive_counts(config)
    assert (counts.images, counts.trained_per_image, counts.transitions) == (96, 6, 576)
    assert (counts.transitions_per_update, counts.micro_batches_per_update, counts.rollout_calls) == (
        288,
        6,
        2,
    )
    assert "96  8 x 12, in 2 calls of 48" in counts_table(config)
    # A micro-batch that does not divide the counts is lowered, and small iterations make one call.
    odd = ["train.candidates=7", "data.prompts_per_iteration=12", "train.updates_per_rollout=1"]
    assert load_config(None, [*odd, "train.micro_batch=72"]).train.micro_batch == 42
    assert load_config(None, ["train.candidates=2", "data.prompts_per_iteration=2"]).train.micro_batch == 4
    # 0.29 * 100 is 28.999999999999996 in binary
    config = load_config(
        None, ["sampler.num_steps=101", "train.timestep_fraction=0.29", "train.updates_per_rollout=1"]
    )
    assert derive_counts(config).trained_per_image == 29


def test_no_key_is_dead():
    sources = [*(ROOT / "dancegrpo").rglob("*.py"), *(ROOT / "tools").glob("*.py")]
    code = "\n".join(path.read_text() for path in sources if path.name not in ("schema.py", "load.py"))
    dead = [
        f"{section}.{key}"
        for section, values in Config().to_dict().items()
        for key in values
        if not re.search(rf"\b{section}\.{key}\b", code)
    ]
    assert not dead


def test_configs_of_the_small_flux_differ_only_where_they_say():
    """They are copies of flux_small.yaml, so that each explains itself; a key changed in one only is a mistake."""

    def leaves(name):
        tree = load_config(name).to_dict()
        return {(section, key): value for section in tree for key, value in tree[section].items()}

    def changed(name):
        other = leaves(name)
        return {f"{section}.{key}" for (section, key), value in base.items() if other[section, key] != value}

    base = leaves("flux_small.yaml")
    assert changed("flux_small_long.yaml") == {"train.iterations"}
    assert changed("flux_small_clip.yaml") == {
        "reward.terms",
        "train.iterations",
        "train.updates_per_rollout",
        "train.trained_prompts",
        "train.kl_weight",
    }
    for name in ("flux_small_long.yaml", "flux_small_clip.yaml"):
        assert shipped_configs()[name].read_text().count("Differs.") == len(changed(name))
