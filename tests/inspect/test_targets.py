"""Presets, configurations of transformers, and batches that nobody wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from fxzero._compat import building_on_fakes, fake_tensors, is_fake, no_value_error
from fxzero.errors import ConfigError
from fxzero.inspect import capture
from fxzero.inspect.targets import Sizes, load, model_and_batch
from fxzero.inspect.targets.presets import PRESETS
from fxzero.inspect.targets.pretrained import weights_left_out

ROOT = Path(__file__).parents[2]

BILLIONS = {
    "gpt-lite": 0.125,
    "gpt2-1.5b": 1.56,
    "minigpt-1.7b": 1.86,
    "minigpt-12.8b": 13.3,
    "minigpt-45b": 45.5,
    "gpt-7.5b": 7.5,
    "gpt-128b": 127.7,
    "gpt-1t": 1008.0,
    "llama3-8b": 8.03,
    "llama3-70b": 70.55,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_as_large_as_their_names_say(name: str) -> None:
    """On the meta device, where they take no memory."""
    with torch.device("meta"):
        model = load(name).build()
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert billions == pytest.approx(BILLIONS[name], rel=0.01)
    assert model.training


def batch_text(model: Any, *sizes: Any, **named: Any) -> str:
    """The batch of a model, as it is shown."""
    return model_and_batch(model, Sizes(*sizes, **named))[1].text()


def test_a_configuration_of_transformers(tmp_path: Path) -> None:
    """A kind of model, a file, a folder; with the head and the dtype that it says."""
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "vocab_size": 100,
        "num_labels": 3,
        "dtype": "bfloat16",
    }
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    for name in (f"hf:{file}", f"hf:{tmp_path}"):
        target = load(name)
        assert target.param_dtype is torch.bfloat16
        model = target.build()
        assert type(model).__name__ == "BertForSequenceClassification"
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert batch_text(model, 3, 16) == "input_ids=int64[3,16], labels=int64[3]"


@pytest.mark.parametrize(
    ("kind", "model", "millions"),
    [
        ("gpt2", "GPT2LMHeadModel", 124.4),
        ("t5", "T5ForConditionalGeneration", 60.5),
        ("whisper", "WhisperForConditionalGeneration", 37.8),
        ("vit", "ViTForImageClassification", 85.8),
    ],
)
def test_a_kind_of_transformers(kind: str, model: str, millions: float) -> None:
    """The head that it is trained with, tied weights once, on tensors without values."""
    with fake_tensors():
        built = load(f"hf:{kind}").build()
    assert type(built).__name__ == model
    assert sum(p.numel() for p in built.parameters()) / 1e6 == pytest.approx(millions, abs=0.1)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hf:lama", "did you mean 'llama'"),
        ("hf:nobody/nothing-like-it", "hf download nobody/nothing-like-it config.json"),
        ("hf:no/such/config.json", "there is no file"),
        ("nothing", "is no preset"),
    ],
)
def test_targets_that_there_are_not(name: str, words: str) -> None:
    """Said with what to do."""
    with pytest.raises(ConfigError, match=words):
        load(name)


def test_a_configuration_that_is_none(tmp_path: Path) -> None:
    """Cut short, of another kind, or with code of its own, which is not run."""
    file = tmp_path / "config.json"
    for text in ('{"model_type": "ll', '{"model_type": "no_such"}', "[]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="is no configuration that can be read"):
            load(f"hf:{file}")
    marker = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')")
    file.write_text('{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}')
    with pytest.raises(ConfigError):
        load(f"hf:{tmp_path}")
    assert not marker.exists()


def test_a_negative_number_of_layers(tmp_path: Path) -> None:
    """Python makes none of it without a word."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": -1, "vocab_size": 9}))
    with fake_tensors(), pytest.raises(ConfigError, match="num_hidden_layers=-1, which no model"):
        load(f"hf:{file}").build()


def lazy() -> nn.Module:
    """Of which nobody knows the size."""
    return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))


def parallel() -> nn.Module:
    """In somebody else's hands."""
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


@pytest.mark.parametrize(
    ("name", "words"), [("lazy", "name their sizes"), ("parallel", "Return the model as it is")]
)
def test_habits_that_need_values(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        capture(load(f"tests.inspect.test_targets:{name}").build, zero=3, world_size=2)


def whole_numbers() -> nn.Parameter:
    """No parameter, and no lazy one."""
    return nn.Parameter(torch.zeros(3, dtype=torch.int64))


def test_no_habit_is_named_that_it_is_not() -> None:
    with pytest.raises(ConfigError, match="require gradients") as raised:
        capture(load("tests.inspect.test_targets:whole_numbers").build, zero=3, world_size=2)
    assert "lazy" not in str(raised.value)


def test_rates_that_grow_with_depth_are_known() -> None:
    """Read from a tensor; longer ones have no values, as anything else."""
    with fake_tensors(), building_on_fakes():
        rates = torch.linspace(0, 0.3, 4)
        assert is_fake(rates)
        assert [rate.item() for rate in rates] == pytest.approx([0, 0.1, 0.2, 0.3])
        first, second = (part.tolist() for part in (2 * rates).split(2))
        assert first + second == pytest.approx([0, 0.2, 0.4, 0.6])
        long, half = torch.linspace(0, 1, 5000), torch.linspace(0, 1, 3, dtype=torch.bfloat16)
        assert is_fake(long)
        assert half.dtype is torch.bfloat16
        with pytest.raises(no_value_error()):
            long[0].item()
    assert torch.linspace(0, 1, 3).tolist() == [0, 0.5, 1]
    with fake_tensors(), pytest.raises(no_value_error()):
        torch.linspace(0, 1, 3)[0].item()


def test_numbers_on_the_meta_device() -> None:
    """A batch norm counts its batches in one."""
    with fake_tensors(), building_on_fakes(), torch.device("meta"):
        norm, number = nn.BatchNorm2d(4), torch.tensor([1.0, 2.0], requires_grad=True)
    assert all(map(is_fake, [*norm.parameters(), *norm.buffers(), number]))
    assert norm.num_batches_tracked is not None
    assert (norm.num_batches_tracked.dtype, number.requires_grad) == (torch.int64, True)


@pytest.mark.parametrize("kind", ["convnext", "swinv2"])
def test_vision_models_that_drop_paths(kind: str) -> None:
    with fake_tensors(), building_on_fakes():
        model = load(f"hf:{kind}").build()
    assert sum(p.numel() for p in model.parameters()) > 20e6


def small_llama() -> Any:
    """A configuration."""
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=64,
        max_position_embeddings=64,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in bfloat16, on disk."""
    folder: Path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(small_llama()).to(torch.bfloat16).save_pretrained(folder)
    return folder


LOADED = {
    "as it was saved": {},
    "in another dtype": {"dtype": torch.float32},
    "with a changed configuration": {"hidden_act": "gelu", "attn_implementation": "eager"},
    "with a configuration": {"config": small_llama(), "dtype": torch.float64},
}


@pytest.mark.parametrize("by", [AutoModelForCausalLM, LlamaForCausalLM], ids=lambda by: by.__name__)
@pytest.mark.parametrize("given", LOADED.values(), ids=LOADED)
def test_a_pretrained_model_is_made_of_its_configuration(
    saved: Path, by: Any, given: dict[str, Any]
) -> None:
    """As it would be loaded, but for the weights, which nobody reads."""
    real = by.from_pretrained(saved, **given)
    weights = saved / "model.safetensors"
    weights.rename(saved / "elsewhere")
    try:
        with fake_tensors(), building_on_fakes(), weights_left_out():
            made = by.from_pretrained(saved, **given)
    finally:
        (saved / "elsewhere").rename(weights)
    assert type(made) is type(real)
    assert made.training is real.training is False
    assert shapes(made) == shapes(real)
    assert all(map(is_fake, [*made.parameters(), *made.buffers()]))
    for name in ("hidden_act", "_attn_implementation", "dtype"):
        assert getattr(made.config, name) == getattr(real.config, name), name
    assert vars(PreTrainedModel)["from_pretrained"].__func__.__module__.startswith("transformers.")


def shapes(model: nn.Module) -> dict[str, Any]:
    """Of parameters and buffers, tied ones included."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return {name: (tuple(value.shape), value.dtype) for name, value in named}


def loaded_as(folder: Path, kind: Any, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """By name of a parameter its dtype and whether it is trained: loaded, and made."""

    def facts(model: nn.Module) -> dict[str, Any]:
        return {n: (p.dtype, p.requires_grad) for n, p in model.named_parameters()}

    real = facts(kind.from_pretrained(folder, **given))
    with fake_tensors(), building_on_fakes(), weights_left_out():
        return real, facts(kind.from_pretrained(folder, **given))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_kept_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    """A T5 in float16 overflows in one of its layers."""
    config = T5Config(d_model=16, d_ff=32, d_kv=4, num_layers=1, num_heads=2, vocab_size=32)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    real, made = loaded_as(tmp_path, T5ForConditionalGeneration, dtype=dtype)
    assert made == real
    dtypes = {kept for kept, _ in made.values()}
    assert dtypes == ({dtype, torch.float32} if dtype is torch.float16 else {dtype})


def test_what_a_constructor_froze(tmp_path: Path) -> None:
    """Loading makes it a parameter as any other, or does not: by version."""
    sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = WhisperConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, vocab_size=64, **sizes, **heads
    )
    config.pad_token_id = config.bos_token_id = config.eos_token_id = 1
    config.decoder_start_token_id = 2
    WhisperForConditionalGeneration(config).save_pretrained(tmp_path)
    real, made = loaded_as(tmp_path, WhisperForConditionalGeneration)
    assert made == real


def test_a_larger_vocabulary_and_what_loading_tells(saved: Path) -> None:
    with fake_tensors(), building_on_fakes(), weights_left_out():
        model, told = LlamaForCausalLM.from_pretrained(saved, output_loading_info=True)
        model.resize_token_embeddings(100)
    assert told["missing_keys"] == set()
    assert model.get_input_embeddings().weight.shape == (100, 32)


@pytest.mark.parametrize("by", [AutoModelForCausalLM, LlamaForCausalLM], ids=lambda by: by.__name__)
def test_saved_adapters_are_refused(saved: Path, by: Any, tmp_path: Path) -> None:
    """transformers would add them without a word."""
    peft = pytest.importorskip("peft", reason="needs peft")
    base = LlamaForCausalLM.from_pretrained(saved)
    peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with weights_left_out(), pytest.raises(ConfigError, match="would add saved adapters"):
        by.from_pretrained(tmp_path)


def on_meta() -> tuple[nn.Module, Tensor]:
    """All of it where tensors have no memory."""
    with torch.device("meta"):
        return nn.Linear(8, 8), torch.randn(3, 8)


def test_a_batch_on_the_meta_device() -> None:
    """Is brought where the model is."""
    found = capture(on_meta, zero=3, world_size=2)
    assert found.batch.text() == "float32[3,8]"
    assert not any(value.is_meta for value in found.batch.tensors)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": {"": torch.float32}}, "one dtype is known here"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantization_config=….* no weights are"),
        ({"state_dict": {"a": 1}}, "state_dict=…"),
    ],
)
def test_what_only_weights_could_tell(saved: Path, given: dict[str, Any], words: str) -> None:
    with weights_left_out(), pytest.raises(ConfigError, match=words):
        LlamaForCausalLM.from_pretrained(saved, **given)


def test_quantized_weights(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with weights_left_out(), pytest.raises(ConfigError, match="has quantized weights"):
        LlamaForCausalLM.from_pretrained(tmp_path)


def test_a_factory_that_imports_transformers_first(saved: Path, tmp_path: Path) -> None:
    """In another process, as here it has been imported; and with adapters."""
    (tmp_path / "mine.py").write_text(
        "def adapted():\n"
        "    from transformers import AutoModelForCausalLM\n"
        "    from peft import LoraConfig, get_peft_model\n"
        f"    base = AutoModelForCausalLM.from_pretrained({str(saved)!r})\n"
        "    return get_peft_model(base, LoraConfig(target_modules=['q_proj'], r=4)).train()\n"
    )
    (saved / "model.safetensors").rename(saved / "elsewhere")
    sizes = ["--world-size", "2", "--seq-len", "8", "--zero", "3", "--json"]
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "fxzero", "estimate", *sizes, "mine.py:adapted"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
    finally:
        (saved / "elsewhere").rename(saved / "model.safetensors")
    assert ran.returncode == 0, ran.stderr
    states = json.loads(ran.stdout)["stages"]["3"]["states"]
    assert 0 < states["gradient_bytes"] < 0.2 * states["parameter_bytes"]


class Words(nn.Module):
    """Reads ids."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        """(B, S) to a loss."""
        logits = self.head(self.table(idx))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())  # type: ignore[union-attr]


class Two(nn.Module):
    """Reads two things."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """(B, 4) twice."""
        return self.layer(x) + context


def test_batches_by_a_signature() -> None:
    """Ids for an embedding, images for a convolution, rows for a matrix."""
    assert batch_text(Words(), 3, 5) == "idx=int64[3,5], targets=int64[3,5]"
    assert batch_text(nn.Linear(7, 2), 4) == "input=float32[4,7]"
    assert batch_text(nn.Conv2d(3, 4, 3)) == "input=float32[2,3,224,224]"
    assert batch_text(nn.LSTM(6, 8, batch_first=True), 2, 9) == "input=float32[2,9,6]"


def test_batches_of_transformers() -> None:
    """Decoders, encoders with decoders, images, sound."""
    import transformers as hf

    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    small["intermediate_size"] = 64
    t5 = {"d_model": 32, "num_layers": 1, "num_heads": 2, "d_kv": 16, "d_ff": 32, "vocab_size": 90}
    models = {
        hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=32, patch_size=8)): (
            "pixel_values=float32[2,3,32,32], labels=int64[2]"
        ),
        hf.T5ForConditionalGeneration(hf.T5Config(**t5)): (
            "input_ids=int64[2,16], labels=int64[2,16], decoder_input_ids=int64[2,16], "
            "use_cache=False"
        ),
        hf.T5Model(hf.T5Config(**t5)): (
            "input_ids=int64[2,16], decoder_input_ids=int64[2,16], use_cache=False"
        ),
        hf.BertForQuestionAnswering(hf.BertConfig(**small, vocab_size=90)): (
            "input_ids=int64[2,16], start_positions=int64[2], end_positions=int64[2]"
        ),
    }
    for model, expected in models.items():
        reads_tokens = "input_ids" in expected
        assert batch_text(model, 2, 16 if reads_tokens else None) == expected


def test_batches_by_hand() -> None:
    """Named and positional, with sizes that are said elsewhere."""
    text = "float32[B,4], context=float32[B,4]"
    model, batch = model_and_batch(Two(), Sizes(5, None, text))
    assert batch.text() == text.replace("B", "5")
    assert model(*batch.args, **batch.kwargs).shape == (5, 4)
    _, ids = model_and_batch(Words(), Sizes(2, 3, "idx=int64[B,S]<50, targets=int32[B,S]<50"))
    assert ids.text() == "idx=int64[2,3], targets=int32[2,3]"
    assert ids.num_tokens == 6
    assert max(int(t.max()) for t in ids.tensors) < 50


@pytest.mark.parametrize(
    ("model", "sizes", "words"),
    [
        (Two(), Sizes(), "of which more than one could be anything"),
        (nn.ReLU(), Sizes(), "no layer of it says what it reads"),
        (nn.Linear(7, 2), Sizes(seq_len=3), "reads no rows of tokens"),
        (nn.Conv2d(3, 4, 3), Sizes(seq_len=224), "reads no rows of tokens"),
        (nn.LSTM(6, 8), Sizes(), "no layer of it says what it reads"),
        (Two(), Sizes(inputs="x=float32[2"), "is no input"),
        (Two(), Sizes(inputs="x=float33[2]"), "torch has no dtype"),
        (Two(), Sizes(inputs="x=float32[B,S]"), "say it by --seq-len"),
        (Two(), Sizes(inputs="x=float32[B,Q]"), "has a size 'Q'"),
        (Two(), Sizes(inputs="x=float32[2]<4"), "only whole numbers"),
        (Two(), Sizes(inputs="x=int64[2]<0"), "nothing is below"),
        (Two(), Sizes(inputs="x=int64[2], x=int64[2]"), "sets x twice"),
        (Two(), Sizes(inputs="x=int64[2], int64[2]"), "follows one that has"),
        (Two(), Sizes(rows=3, inputs="x=int64[2]"), "no shape of --inputs has B in it"),
    ],
)
def test_batches_that_cannot_be(model: nn.Module, sizes: Sizes, words: str) -> None:
    """Refused, with what to write instead."""
    with pytest.raises(ConfigError, match=words):
        model_and_batch(model, sizes)


def test_a_guess_leaves_modes_as_they_are() -> None:
    """A part that its owner has put in eval mode stays there, and so does the rest in train."""
    model = Words()
    model.head.eval()
    model_and_batch(model, Sizes(2, 3))
    assert [m.training for m in (model, model.table, model.head)] == [True, True, False]


def test_inputs_have_the_parameters_dtype() -> None:
    """A model in double precision is not called with floats."""
    assert batch_text(nn.Linear(7, 2).double(), 4) == "input=float64[4,7]"


def test_a_guess_that_does_not_run_is_shown() -> None:
    """With the error, and how to say it by hand."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(10, 2))
    with pytest.raises(ConfigError, match=r"input=float32\[2,3,224,224\], raised .* --inputs"):
        model_and_batch(model, Sizes())
