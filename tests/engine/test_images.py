"""Images: through SGLang's own processors, over the wire without pickles, answered like Hugging Face."""

from __future__ import annotations

import base64
import io
import shutil
import warnings
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prism.config.catalog import load_catalog
from prism.core.errors import InvalidValue
from prism.server.kinds import CHAT
from tests.engine.rig import Rig, codec
from tests.server.live import import_sglang

pytestmark = pytest.mark.engine
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
NEW = 12
MARKS = {
    "image_token": "<image_soft_token>",
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
}
PER_IMAGE = 4
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<start_of_image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(folder: Path, like: Path) -> Path:
    """A tiny Gemma-3 with random weights, its processor, and the tokenizer of the model ``like`` with the marks that
    images need."""
    import torch
    import transformers

    folder.mkdir()
    for file in TOKENIZER:
        if (like / file).exists():
            shutil.copy(like / file, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, extra_special_tokens=MARKS)
    tokenizer.pad_token = tokenizer.eos_token
    ids = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in MARKS.items()}
    config = transformers.Gemma3Config(
        text_config={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 1024,
            "max_position_embeddings": 1024,
            "vocab_size": len(tokenizer),
            "initializer_range": 0.1,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
            "hidden_act": "quick_gelu",  # SGLang's encoder knows no other, whatever a config says
        },
        mm_tokens_per_image=PER_IMAGE,
        image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
        initializer_range=0.1,
        dtype="float32",
    )
    torch.manual_seed(9)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "post_" in name and "language_model" in name and parameter.dim() == 1:
                parameter += 6.0  # what layers add outweighs the token itself, which would answer everything otherwise
            elif "mm_input_projection" in name or ("vision" in name and parameter.dim() > 1):
                torch.nn.init.normal_(parameter, std=0.5)  # pictures differ
    model.save_pretrained(folder)
    _name_as_published(folder / "model.safetensors")
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56})
    transformers.Gemma3Processor(images, tokenizer, TEMPLATE, PER_IMAGE).save_pretrained(folder)
    return folder


def _name_as_published(file: Path) -> None:
    """Checkpoints have a level in the encoder's names that newer releases of transformers leave out."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    old, new = "vision_tower.", "vision_tower.vision_model."
    save_file({name.replace(old, new): tensor for name, tensor in tensors.items()}, file, metadata={"format": "pt"})


def picture(seed: int, width: int = 100, height: int = 80) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(values).resize((width, height), Image.Resampling.NEAREST)


def data_url(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def messages(text: str, *images: Image.Image) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@cache
def reference_model(path: Path) -> Any:
    import torch
    import transformers

    return transformers.Gemma3ForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()


def reference(path: Path, text: str, *images: Image.Image) -> list[int]:
    """What Hugging Face answers, greedy, when the tokens of an image see only those before them, as SGLang has it."""
    import torch
    import transformers

    torch.set_num_threads(1)
    processor = transformers.AutoProcessor.from_pretrained(path)
    parts = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    prompt = processor.apply_chat_template([{"role": "user", "content": parts}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=list(images) or None, return_tensors="pt")
    model = reference_model(path)
    model.generation_config.eos_token_id = None
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, pad_token_id=2)
    found: list[int] = out[0, inputs["input_ids"].shape[1] :].tolist()
    return found


class FrontSide:
    """A front door's objects for one model, up to the queue."""

    def __init__(self, path: Path) -> None:
        import_sglang()
        from prism.server.sglang_build import builder

        (path.parent / "c.yaml").write_text(
            f"models: [{{name: m, path: {path.name}}}]\nserver: {{images: {{max_count: 2}}}}"
        )
        catalog = load_catalog(path.parent / "c.yaml")
        self.engine_args = dict(catalog.spec("m").engine_args)
        broker: Any = SimpleNamespace()
        self.served = builder(broker)(catalog, catalog.model("m"))

    async def tokenized(self, text: str, *images: Image.Image) -> Any:
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        from prism.server.sglang_manager import new_call

        asked = {"model": "m", "messages": messages(text, *images), "max_completion_tokens": NEW, "temperature": 0}
        request = ChatCompletionRequest.model_validate({**asked, "ignore_eos": True})
        adapted = self.served.endpoints[CHAT].convert(request)
        adapted.normalize_batch_and_arguments()
        call = new_call("req_1", "", self.served.objectives, "messages")
        call.max_prepared_bytes = 1 << 20
        found = await self.served.manager._tokenize(adapted, call, False)
        found.rid = ""
        return found


@pytest.mark.slow
async def test_answers_to_images_are_those_of_hugging_face(rig: Rig, tmp_path: Path) -> None:
    path = make_model(tmp_path / "vl", rig.models / "demo-llama")
    front = FrontSide(path)
    asked = [("what is this", picture(1)), ("compare", picture(2), picture(3, 60, 120)), ("no picture",)]
    for from_image in (False, True):
        handle = await rig.activate(rig.spec_at(path, **front.engine_args), [rig.devices[0]])
        try:
            assert handle.info.from_image is from_image
            rids = [rig.submit(handle, await front.tokenized(text, *images)) for text, *images in asked]
            answers = [await rig.answer(rid) for rid in rids]
        finally:
            await handle.deactivate()
        assert answers == [reference(path, text, *images) for text, *images in asked]


@pytest.mark.slow
async def test_an_answer_to_an_image_goes_on_in_another_engine(rig: Rig, tmp_path: Path) -> None:
    path = make_model(tmp_path / "vl", rig.models / "demo-llama")
    front = FrontSide(path)
    request = await front.tokenized("what is this", picture(1))
    whole = reference(path, "what is this", picture(1))
    handle = await rig.activate(rig.spec_at(path, **front.engine_args), [rig.devices[0]])
    try:
        assert await rig.ask(handle, request, attempt=2, resumed=whole[:5]) == whole
    finally:
        await handle.deactivate()


def media() -> Any:
    import torch
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalProcessorOutput

    item = MultimodalDataItem(
        modality=Modality.IMAGE,
        hash=(1 << 127) + 1,
        offsets=[(1, 4)],
        feature=torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        model_specific_data={
            "grid": torch.tensor([[1, 2, 3]]),
            "sizes": [(3, 4)],
            "array": np.ones((2, 2), np.float16),
        },
    )
    return MultimodalProcessorOutput(mm_items=[item], input_ids=[1, 2], im_token_id=7, mrope_positions=torch.ones(3, 2))


def test_prepared_images_survive_the_wire() -> None:
    codec()
    import torch

    from prism.engine.sglang_media import pack_media, unpack_media

    sent, found = media(), unpack_media(pack_media(media()))
    [item], [before] = found.mm_items, sent.mm_items
    assert (item.modality, item.hash, item.offsets, item.format) == (
        before.modality,
        before.hash,
        [(1, 4)],
        before.format,
    )
    assert item.feature.dtype == torch.bfloat16 and torch.equal(item.feature, before.feature)
    assert torch.equal(item.grid, before.grid) and item.sizes == [(3, 4)]
    assert np.array_equal(item.array, before.array) and item.array.dtype == np.float16
    assert (found.input_ids, found.im_token_id, found.video_token_id) == ([1, 2], 7, None)
    assert torch.equal(found.mrope_positions, sent.mrope_positions)


@pytest.mark.parametrize("value", [object(), {"a": [object()]}, np.array(["x"]), np.array([object()])])
def test_what_has_no_coding_is_refused(value: Any) -> None:
    codec()
    from prism.engine.sglang_media import pack_media

    odd = media()
    odd.mm_items[0].model_specific_data["odd"] = value
    with pytest.raises(InvalidValue):
        pack_media(odd)


@pytest.mark.parametrize("cut", [0, 1, 10, 100])
def test_bytes_that_are_no_images_are_refused(cut: int) -> None:
    codec()
    from prism.engine.sglang_media import pack_media, unpack_media

    data = pack_media(media())
    for broken in (data[:cut], b"\x93" + data[1 + cut :], data.replace(b"tensor", b"senile")):
        with pytest.raises(InvalidValue):
            unpack_media(broken)
