"""What engine tests work with: a pool on virtual devices, a front door's mailbox, requests, reference answers."""

from __future__ import annotations

import asyncio
import functools
import itertools
import tempfile
import warnings
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prism.core.ids import DeviceId, Generation, ModelName, NodeId
from prism.core.instances import InstanceKey, whole_model
from prism.core.pace import DevicePace
from prism.core.specs import DeviceKind, DeviceSpec, ModelShape, ModelSpec
from prism.engine import boot, cuda_stub
from prism.engine.api import Work
from prism.engine.events import AnyEvent
from prism.engine.handle import EngineHandle
from prism.engine.options import PoolOptions
from prism.engine.pool import EnginePool
from prism.wire.mailbox import Inbox
from prism.wire.messages import TokenItem, Tokens
from tests.patience import PATIENCE_S

MODELS = ("demo-llama", "demo-qwen3", "demo-stablelm")
DEVICE_BYTES = 128 << 20
_UNDER_WAY_S = 5.0
"""What an engine sent before its end is here after this."""
_LOOK_S = 0.2
"""How often it is looked whether an engine that says nothing is still there."""
_SHAPE = ModelShape(layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, intermediate=1, vocab=1)


def codec() -> Any:
    """:mod:`prism.engine.sglang_codec`, importable without a GPU driver and whatever SGLang warns about."""
    boot.prepare_environment("host")
    cuda_stub.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from prism.engine import sglang_codec
    return sglang_codec


class _Words:
    """The little of a tokenizer that SGLang's parameter check asks for."""

    eos_token_id = 1

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(text.encode())


def tokenized(rid: str, prompt: Sequence[int], new_tokens: int = 20, *, logprobs: bool = False, **sampling: Any) -> Any:
    """SGLang's tokenized request; greedy and without end-of-sequence unless told otherwise."""
    codec()
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**{"max_new_tokens": new_tokens, "temperature": 0, "ignore_eos": True, **sampling})
    params.normalize(_Words())
    return TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", prompt),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=params,
        return_logprob=logprobs,
        logprob_start_len=0 if logprobs else -1,
        top_logprobs_num=2 if logprobs else 0,
        token_ids_logprob=None,
        stream=False,
    )


@functools.cache
def _reference_model(path: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@functools.cache
def reference(path: Path, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    """What Hugging Face ``generate`` answers, greedy in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch

        torch.set_num_threads(1)
        model = _reference_model(path)
        with torch.no_grad():
            out = model.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def prompt(seed: int, length: int = 30) -> tuple[int, ...]:
    """Some prompt tokens that every demo model's vocabulary has."""
    return tuple((7 * seed + 13 * i) % 900 + 10 for i in range(length))


class Rig:
    """A pool, a front door's mailbox and what arrived in it."""

    def __init__(
        self, folder: Path, models: Path, zygote: Path, pace: DevicePace | None = None, **options: Any
    ) -> None:
        """``pace``: of the devices; ``options``: further ones of the pool."""
        self.models, self.folder = models, folder
        self.devices = tuple(DeviceId(f"local/host:{i}") for i in range(2))
        specs = [DeviceSpec(d, NodeId("local"), DeviceKind.HOST, DEVICE_BYTES, pace=pace) for d in self.devices]
        settings = PoolOptions(
            run_dir=folder / "run",
            account_dir=folder / "accounts",
            store_dir=folder / "store",
            zygote_socket=zygote,
            **options,
        )
        self.pool = EnginePool(specs, settings)
        self.inbox = Inbox(f"ipc://{folder}/front")
        self.items: dict[str, list[TokenItem]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, dict[str, object]] = {}
        self._engines: dict[str, EngineHandle] = {}
        """Who has the request."""
        self._changed = asyncio.Event()
        self._numbers = itertools.count(1)
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        try:
            await self.pool.start()
        except BaseException:
            self.inbox.close()  # a context of ZeroMQ with an open socket waits for it for ever when it is collected
            raise
        self._reader = asyncio.create_task(self._read())

    async def close(self) -> None:
        await self.pool.close()
        assert self._reader is not None
        self._reader.cancel()
        self.inbox.close()

    async def _read(self) -> None:
        async for message in self.inbox:
            assert isinstance(message, Tokens)
            for item in message.items:
                known = self.tokens.setdefault(item.id, [])
                assert item.start <= len(known), f"{item.id}: tokens missing before {item.start}"
                known[item.start :] = item.token_ids
                self.items.setdefault(item.id, []).append(item)
                if item.finish is not None:
                    self.finish[item.id] = item.finish
            self._changed.set()

    def spec(self, name: str, tp: int = 1, **engine_args: Any) -> ModelSpec:
        return self.spec_at(self.models / name, tp, **engine_args)

    def spec_at(self, path: Path, tp: int = 1, **engine_args: Any) -> ModelSpec:
        return ModelSpec(
            name=ModelName(path.name),
            path=str(path),
            slo_ttft_s=1.0,
            slo_tpot_s=0.1,
            weight_bytes=sum(f.stat().st_size for f in path.glob("*.safetensors")),
            shape=_SHAPE,
            context_tokens=0,
            tp=tp,
            engine_args=tuple(engine_args.items()),
        )

    async def activate(self, spec: ModelSpec, devices: Sequence[DeviceId], **kwargs: Any) -> EngineHandle:
        """A new instance of ``spec`` as one part on ``devices``."""
        key, (part,) = InstanceKey(spec.name, Generation(next(self._numbers))), whole_model(devices)
        return await self.pool.activate(key, spec, part, **kwargs)

    @asynccontextmanager
    async def engine(self, name: str, *devices: int, **kwargs: Any) -> AsyncIterator[EngineHandle]:
        """``name`` active on ``devices`` (default: the first), deactivated at the end."""
        where = [self.devices[i] for i in devices or (0,)]
        handle = await self.activate(self.spec(name, tp=len(where)), where, **kwargs)
        try:
            yield handle
        finally:
            await handle.deactivate()

    def submit(
        self, handle: EngineHandle, request: Any, *, attempt: int = 0, resumed: Sequence[int] = (), front: str = ""
    ) -> str:
        """Hand over ``request`` (or raw bytes) under a new id, or under its own if it has one."""
        raw = isinstance(request, bytes)
        rid = request.rid if not raw and request.rid else f"r{next(self._numbers)}"
        payload = request if raw else codec().encode_request(request)
        if resumed:
            self.tokens[rid] = list(resumed)
        self.finish.pop(rid, None)
        self._engines[rid] = handle
        handle.submit(Work(rid, payload, front or self.inbox.address, attempt, tuple(resumed)))
        return rid

    async def wait_tokens(self, rid: str, count: int, timeout_s: float = PATIENCE_S) -> list[int]:
        """The request's tokens as soon as there are ``count``. Fails, with the engine's words, when the engine that
        has it is over and no more comes from it."""
        async with asyncio.timeout(timeout_s):
            while len(self.tokens.get(rid, ())) < count and rid not in self.finish:
                await self._next_message(rid)
        return list(self.tokens.get(rid, ()))

    async def _next_message(self, rid: str) -> None:
        engine = self._engines[rid]
        alive = engine.alive
        self._changed.clear()
        try:
            async with asyncio.timeout(_LOOK_S if alive else _UNDER_WAY_S):
                await self._changed.wait()
        except TimeoutError:
            assert alive, f"engine {engine.id} ended before it had answered {rid}: {engine.ended}"

    async def answer(self, rid: str, timeout_s: float = PATIENCE_S) -> list[int]:
        """All tokens of the request, once it is finished."""
        return await self.wait_tokens(rid, 1 << 30, timeout_s)

    async def ask(self, handle: EngineHandle, request: Any, **kwargs: Any) -> list[int]:
        """Submit and wait for the whole answer."""
        return await self.answer(self.submit(handle, request, **kwargs))

    def reference(self, name: str, prompt: Sequence[int], new_tokens: int) -> list[int]:
        return reference(self.models / name, tuple(prompt), new_tokens)

    def free_bytes(self, device: int = 0) -> int:
        """Free bytes in the books, after checking them against the kernel."""
        account = self.pool.memory[self.devices[device]]
        audit = account.audit()
        assert audit.problems == ()
        return account.free_bytes()


async def until_died(handle: EngineHandle) -> list[AnyEvent]:
    """All events of ``handle`` up to its end."""
    return [event async for event in handle.events()]


@asynccontextmanager
async def opened(zygote: Path, models: Path, **options: Any) -> AsyncIterator[Rig]:
    """A rig in a folder of its own; ``options`` as :class:`Rig` has them."""
    with tempfile.TemporaryDirectory(prefix="prism-f-") as folder:
        rig = Rig(Path(folder), models, zygote, **options)
        await rig.start()
        try:
            yield rig
        finally:
            await rig.close()
