"""What will become of a model is foretold from its files, with what would serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prism.config.engine_args import registries
from prism.config.forecast import POOLS, REFUSED, KvKind, guessing_obstacles, kv_kind, obstacles
from prism.config.model_kinds import kind_of, pooling_problem
from prism.config.unserved import STATES, UNSERVED, Unserved
from prism.core.specs import DeviceKind, ModelKind

HOST, CUDA = (DeviceKind.HOST,), (DeviceKind.CUDA,)


@pytest.mark.parametrize(
    ("architecture", "more", "kind"),
    [
        ("LlamaForCausalLM", {}, ModelKind.GENERATE),
        ("BertModel", {}, ModelKind.EMBED),
        ("LlamaForSequenceClassification", {}, ModelKind.CLASSIFY),
        ("Qwen2ForRewardModel", {}, ModelKind.CLASSIFY),
        ("LlamaForClassification", {}, ModelKind.CLASSIFY),
        ("BertForSequenceClassification", {"id2label": {"0": "LABEL_0"}}, ModelKind.RERANK),
        ("BertForSequenceClassification", {"id2label": {"0": "bad", "1": "good"}}, ModelKind.CLASSIFY),
        ("BertForSequenceClassification", {}, ModelKind.CLASSIFY),
    ],
)
def test_kinds(architecture: str, more: dict[str, Any], kind: ModelKind) -> None:
    assert kind_of({"architectures": [architecture], **more}, False) is kind


def test_what_comes_with_a_pooling_module_embeds() -> None:
    assert kind_of({"architectures": ["Qwen3ForCausalLM"]}, True) is ModelKind.EMBED
    assert kind_of({"architectures": ["LlamaForSequenceClassification"]}, True) is ModelKind.CLASSIFY
    assert kind_of({}, False) is ModelKind.GENERATE


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, KvKind.PLAIN),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512}, KvKind.LATENT),
        ({"architectures": ["KimiVLForConditionalGeneration"], "text_config": {"kv_lora_rank": 512}}, KvKind.LATENT),
        ({"architectures": ["DeepseekV32ForCausalLM"], "kv_lora_rank": 512, "index_topk": 2048}, KvKind.SPARSE),
        ({"architectures": ["GlmMoeDsaForCausalLM"], "kv_lora_rank": 512, "index_topk": 2048}, KvKind.SPARSE),
        ({"architectures": ["DeepseekV4ForCausalLM"], "sliding_window": 128}, KvKind.SPARSE),
        ({"architectures": ["MiniMaxM3SparseForConditionalGeneration"], "text_config": {}}, KvKind.SPARSE),
        ({"architectures": ["GptOssForCausalLM"], "sliding_window": 128}, KvKind.WINDOWS),
        ({"architectures": ["LagunaForCausalLM"]}, KvKind.PLAIN),
        ({"architectures": ["MiMoV2FlashForCausalLM"]}, KvKind.WINDOWS),
        ({"architectures": ["Qwen3NextForCausalLM"], "layer_types": ["linear_attention"]}, KvKind.STATES),
        ({"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"]}, KvKind.PLAIN),
        ({"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*"}, KvKind.STATES),
    ],
)
def test_states_of_attention(config: dict[str, Any], kind: KvKind) -> None:
    assert kv_kind(config) is kind


def test_what_is_foretold_is_what_engines_do() -> None:
    from sglang_patches.kv_guard import MANAGED, WORDS

    assert set(POOLS) == set(KvKind)
    assert {kind for kind, pools in POOLS.items() if not set(pools) <= MANAGED} == REFUSED
    for kind in REFUSED:
        assert set(POOLS[kind]) <= set(WORDS), "the engine has words for what it refuses"
    assert "sparse" in foretold({"architectures": ["DeepseekV32ForCausalLM"], "index_topk": 2048}, CUDA)


def foretold(config: dict[str, Any], devices: tuple[DeviceKind, ...], wanted: Any = None, **args: Any) -> str:
    return "; ".join(map(str, obstacles(config, args, wanted, False, devices)))


def test_each_obstacle_comes_with_what_would_serve_the_model() -> None:
    mamba = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*"}
    assert "Mamba" in foretold(mamba, HOST) and "what would serve it: " in foretold(mamba, HOST)
    quantised = {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "bitsandbytes"}}
    assert "cuda:N" in foretold(quantised, HOST)
    assert foretold(quantised, CUDA) == foretold(quantised, ()) == ""
    llama = {"architectures": ["LlamaForCausalLM"]}
    assert foretold(llama, HOST) == foretold(llama, HOST, attention_backend="triton") == ""
    assert "torch_native" in foretold(llama, HOST, attention_backend="flashinfer")
    assert foretold(llama, CUDA, attention_backend="flashinfer") == ""


@pytest.mark.parametrize("family", UNSERVED, ids=lambda family: family.serves)
def test_what_sglang_does_not_run_is_foretold(family: Unserved) -> None:
    args = {"attention_backend": family.back_end} if family.back_end else {}
    for name in family.architectures:
        states = {"layer_types": ["linear_attention"]} if family.layout == STATES else {}
        config = {"architectures": [name], **states}
        assert "what would serve it: " in foretold(config, HOST, **args)
        assert ("on no device" in foretold(config, CUDA, **args)) is family.everywhere
        assert family.why in foretold(config, HOST, **args) or family.layout == STATES
        if family.back_end or family.unless:
            assert foretold(config | dict.fromkeys(family.unless, 1), HOST) == ""


def test_a_class_that_sglang_does_not_know() -> None:
    assert "SGLang has no NobodysForCausalLM" in foretold({"architectures": ["NobodysForCausalLM"]}, ())
    wrapped = "HeliumForCausalLM"  # one of Transformers', which SGLang runs with its own attention
    assert wrapped not in registries().architectures and foretold({"architectures": [wrapped]}, HOST) == ""


@pytest.mark.parametrize(
    ("said", "more", "served"),
    [
        ({"quant_method": "fp8"}, {}, True),
        ({"quant_method": "gptq"}, {}, True),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, {}, True),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, {}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, {}, True),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, {}, False),
        ({"quant_method": "fp8"}, {"num_experts": 4}, False),
        ({"quant_method": "mxfp4"}, {"num_local_experts": 4}, True),
    ],
)
def test_formats_that_a_cpu_computes(said: dict[str, Any], more: dict[str, Any], served: bool) -> None:
    model = {"architectures": ["Qwen3ForCausalLM"], "quantization_config": said, **more}
    assert (foretold(model, HOST) == "") is served


@pytest.mark.parametrize(
    ("config", "args", "kind", "found"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, ModelKind.GENERATE, ""),
        ({"architectures": ["BertModel"]}, {}, ModelKind.EMBED, "for models that generate"),
        ({"architectures": ["X"], "kv_lora_rank": 512}, {}, ModelKind.GENERATE, "latent attention"),
        ({"architectures": ["Qwen2VLForConditionalGeneration"]}, {}, ModelKind.GENERATE, "images"),
        ({"architectures": ["LlamaForCausalLM"]}, {"page_size": 16}, ModelKind.GENERATE, "pages of one token"),
        ({"architectures": ["LlamaForCausalLM"]}, {"attention_backend": "triton"}, ModelKind.GENERATE, "triton"),
    ],
)
def test_where_no_tokens_are_guessed(config: dict[str, Any], args: dict[str, Any], kind: ModelKind, found: str) -> None:
    said = "; ".join(map(str, guessing_obstacles(config, args, kind, HOST)))
    assert found in said and bool(found) == bool(said)
    if found:
        assert "without `speculative`" in said or "or none" in said


@pytest.mark.parametrize(
    ("architecture", "wanted", "found"),
    [
        ("Qwen3ForCausalLM", ModelKind.EMBED, ""),
        ("BertModel", ModelKind.GENERATE, "can only embed"),
        ("LlamaForCausalLM", ModelKind.RERANK, "can only generate"),
        ("LlamaForSequenceClassification", ModelKind.GENERATE, "can only classify"),
    ],
)
def test_a_kind_that_the_files_deny(architecture: str, wanted: ModelKind, found: str) -> None:
    said = foretold({"architectures": [architecture]}, (), wanted)
    assert found in said and bool(found) == bool(said)


@pytest.mark.parametrize(
    ("architecture", "modes", "problem"),
    [
        ("BertModel", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, None),
        ("BertModel", {"pooling_mode_mean_tokens": True}, "pools by mean_tokens"),
        ("Qwen3ForCausalLM", {"pooling_mode_lasttoken": True}, None),
        ("Qwen3ForCausalLM", {"pooling_mode": "mean"}, "pools by mean_tokens"),
        ("Qwen3ForCausalLM", {"pooling_mode": "lasttoken"}, None),
    ],
)
def test_vectors_that_would_be_others(
    tmp_path: Path, architecture: str, modes: dict[str, Any], problem: str | None
) -> None:
    names = ["models.Transformer", "models.Pooling", "models.Normalize"]
    modules = [{"path": "" if i == 0 else f"{i}_X", "type": f"sentence_transformers.{n}"} for i, n in enumerate(names)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_X").mkdir()
    (tmp_path / "1_X" / "config.json").write_text(json.dumps(modes))
    found = pooling_problem(tmp_path, [architecture])
    assert found is None if problem is None else found is not None and problem in found
    modules.append({"path": "3_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert "'Dense'" in (pooling_problem(tmp_path, [architecture]) or "")


def test_the_registry_has_the_classes_that_sglang_pools() -> None:
    known = registries()
    assert {"BertModel", "Qwen3ForSequenceClassification"} <= set(known.pooled) < {*known.architectures, *known.pooled}
    assert known.cross_encoders == ("BertForSequenceClassification", "XLMRobertaForSequenceClassification")
    assert "GptOssForCausalLM" in known.window_hybrids and "Qwen2VLForConditionalGeneration" in known.multimodal
