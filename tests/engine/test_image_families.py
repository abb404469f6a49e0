"""Other families that take images: answered like Hugging Face, from files and from the engine image, and resumed."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from PIL import Image

from tests.engine.families import SMALL, TOKENIZER
from tests.engine.rig import Rig
from tests.engine.test_images import NEW, FrontSide, picture

pytestmark = [pytest.mark.engine, pytest.mark.slow]
QWEN_MARKS: Final = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
MROPE: Final[dict[str, Any]] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
ENCODER: Final = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128}
PIXTRAL_MARKS: Final = {"image_token": "[IMG]", "break_token": "[IMG_BREAK]", "end_token": "[IMG_END]"}
PIXTRAL: Final[dict[str, Any]] = {
    "model_type": "pixtral",
    "hidden_act": "silu",  # whatever it says, SGLang takes this one, which published models have
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 56,
    "patch_size": 14,
}
ASKED: Final = (("what is this", picture(1)), ("compare", picture(2), picture(3, 60, 120)), ("no picture",))


def template(image: str) -> str:
    """A chat template in which an image is ``image``."""
    return (
        "{% for message in messages %}<|{{ message['role'] }}|>"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        + image
        + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )


def tokenizer_with(marks: dict[str, str], like: Path) -> tuple[Any, dict[str, int]]:
    """The tokenizer of the model ``like`` with these marks, and their numbers."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(like, extra_special_tokens=marks)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer, {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in marks.items()}


def make_qwen2_vl(folder: Path, like: Path) -> None:
    """M-RoPE, images of any size."""
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 128, "in_chans": 3}
    make_qwen_vl("Qwen2VL", "Qwen2VL", vision, {}, folder, like)


def make_qwen2_5_vl(folder: Path, like: Path) -> None:
    """Windows in the encoder, but for one layer."""
    vision = {**ENCODER, "window_size": 56, "fullatt_block_indexes": [1]}
    make_qwen_vl("Qwen2_5_VL", "Qwen2VL", vision, {}, folder, like)


def make_qwen3_vl(folder: Path, like: Path) -> None:
    """What its encoder's layers say goes into several of the decoder's."""
    vision = {**ENCODER, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "patch_size": 14}
    rope = {"rope_parameters": {**MROPE, "mrope_interleaved": True}}
    make_qwen_vl("Qwen3VL", "Qwen3VL", vision, {"head_dim": 32, **rope}, folder, like)


def make_qwen_vl(
    name: str, videos: str, vision: dict[str, Any], text: dict[str, Any], folder: Path, like: Path
) -> None:
    """``name``, ``videos``: of Transformers' classes of the model and of its processor of videos."""
    import transformers

    tokenizer, ids = tokenizer_with(QWEN_MARKS, like)
    config = getattr(transformers, f"{name}Config")(
        text_config={**SMALL, "rope_parameters": MROPE, **text, "vocab_size": len(tokenizer)},
        vision_config=vision,
        image_token_id=ids["image_token"],
        video_token_id=ids["video_token"],
        vision_start_token_id=ids["vision_bos_token"],
        vision_end_token_id=ids["vision_eos_token"],
        dtype="float32",
    )
    save(getattr(transformers, f"{name}ForConditionalGeneration"), config, folder)
    sizes = {"size": {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}, "patch_size": 14}
    getattr(transformers, f"{name}Processor")(
        transformers.Qwen2VLImageProcessor(**sizes),
        tokenizer,
        getattr(transformers, f"{videos}VideoProcessor")(),
        chat_template=template("<|vision_start|><|image_pad|><|vision_end|>"),
    ).save_pretrained(folder)


def make_llava(folder: Path, like: Path) -> None:
    """LLaVA with Pixtral's encoder."""
    import transformers

    tokenizer, ids = tokenizer_with(PIXTRAL_MARKS, like)
    config = transformers.LlavaConfig(
        text_config={"model_type": "mistral", **SMALL, "vocab_size": len(tokenizer), "sliding_window": None},
        vision_config=PIXTRAL,
        image_token_index=ids["image_token"],
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        dtype="float32",
    )
    save(transformers.LlavaForConditionalGeneration, config, folder)
    save_pixtral_processor(tokenizer, folder)


def make_mistral3(folder: Path, like: Path) -> None:
    """Pixtral's encoder, four of whose patches become one."""
    import transformers

    tokenizer, ids = tokenizer_with(PIXTRAL_MARKS, like)
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **SMALL, "vocab_size": len(tokenizer), "sliding_window": None},
        vision_config=PIXTRAL,
        image_token_index=ids["image_token"],
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,  # as published: SGLang looks for a tied head in the text's part only
        dtype="float32",
    )
    save(transformers.Mistral3ForConditionalGeneration, config, folder)
    save_pixtral_processor(tokenizer, folder, spatial_merge_size=2)


def save_pixtral_processor(tokenizer: Any, folder: Path, **options: Any) -> None:
    import transformers

    transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(size={"longest_edge": 56}, patch_size={"height": 14, "width": 14}),
        tokenizer,
        patch_size=14,
        chat_template=template("[IMG]"),
        **options,
        **{name.replace("break", "image_break").replace("end_", "image_end_"): m for name, m in PIXTRAL_MARKS.items()},
    ).save_pretrained(folder)


def save(model_class: Any, config: Any, folder: Path) -> None:
    """A model with random weights in which pictures differ."""
    import torch

    torch.manual_seed(9)
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("visual" in name or "vision" in name or "projector" in name):
                torch.nn.init.normal_(parameter, std=0.3)
            elif parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)


def reference(path: Path, text: str, *images: Image.Image) -> list[int]:
    """What Hugging Face answers, greedy."""
    import torch
    import transformers

    torch.set_num_threads(1)
    processor = transformers.AutoProcessor.from_pretrained(path)
    model = transformers.AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=list(images) or None, return_tensors="pt")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=2)
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # transformers, of Qwen-VL
@pytest.mark.parametrize("make", [make_qwen2_vl, make_qwen2_5_vl, make_qwen3_vl, make_llava, make_mistral3])
async def test_answers_to_images_are_those_of_hugging_face(
    rig: Rig, tmp_path: Path, make: Callable[[Path, Path], None]
) -> None:
    path = tmp_path / "vl"
    path.mkdir()
    for file in TOKENIZER:
        if (rig.models / "demo-llama" / file).exists():
            shutil.copy(rig.models / "demo-llama" / file, path)
    make(path, rig.models / "demo-llama")
    front = FrontSide(path)
    requests = [await front.tokenized(text, *images) for text, *images in ASKED]
    expected = [reference(path, text, *images) for text, *images in ASKED]
    assert len({tuple(answer) for answer in expected}) == len(ASKED)
    for from_image in (False, True):
        handle = await rig.activate(rig.spec_at(path, **front.engine_args), [rig.devices[0]])
        try:
            assert handle.info.from_image is from_image
            rids = [rig.submit(handle, request) for request in requests]
            assert [await rig.answer(rid) for rid in rids] == expected
            for request, whole in zip(requests, expected, strict=True):
                assert await rig.ask(handle, request, attempt=2, resumed=whole[:5]) == whole, "resumed"
        finally:
            await handle.deactivate()
