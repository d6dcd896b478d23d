"""A model of `transformers` and its tokenizer, loaded to generate one request's chunk at a time."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Self

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from undercurrent.adapters.hf.options import HFOptions
from undercurrent.adapters.model_map import ModelMap
from undercurrent.errors import ConfigError, EngineDeadError

_DEFAULT_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """See the module.

    Args:
        model: of `transformers`, ready to generate.
        tokenizer: for whoever embeds the engine.
        own_tokenizer: the same, used by the engine alone: a tokenizer may not be used by two threads at once while its
            settings change, and a user may change those of theirs.
        device: where the model runs.
        dtype: NumPy name of its element type.
        layers: decoder layers.
        width: hidden size.
        vocab_size: rows of its output.
        max_model_len: most tokens of prompt plus generation.
        eos: token ids that end a text.
        last_only: arguments by which the model computes the logits of the last token alone, where it can.
    """

    model: Any
    tokenizer: Any
    own_tokenizer: Any
    device: torch.device
    dtype: str
    layers: int
    width: int
    vocab_size: int
    max_model_len: int
    eos: frozenset[int]
    last_only: Mapping[str, int]

    @classmethod
    def load(cls, name: str, options: HFOptions) -> Self:
        """Load a model and its tokenizer.

        Args:
            name: folder or name.
            options: how to run it.

        Raises:
            ConfigError: it is asked for more than the model can.
            EngineDeadError: it cannot be loaded.
        """
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        device = torch.device(_device(options.device))
        shared = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
        dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, **shared)
            config = AutoConfig.from_pretrained(name, **shared)
            attention = options.attn_implementation or _attention(config)
            extra = {"attn_implementation": attention} if attention else {}
            model = AutoModelForCausalLM.from_pretrained(name, config=config, dtype=dtype, **shared, **extra)
            model.to(device).eval()
        # Anything may come out of other people's code here; to whoever starts an engine it is one thing.
        except Exception as exc:
            raise EngineDeadError(f"transformers cannot load {name}: {exc}") from exc
        text = model.config.get_text_config(decoder=True)
        own = copy.deepcopy(tokenizer)
        # Once: a padding or truncation that was saved with a tokenizer is taken out of it by the first call.
        own.encode("a")
        return cls(
            model=model,
            tokenizer=tokenizer,
            own_tokenizer=own,
            device=device,
            dtype=str(model.dtype).removeprefix("torch."),
            layers=text.num_hidden_layers,
            width=text.hidden_size,
            vocab_size=text.vocab_size,
            max_model_len=_max_model_len(text, options.max_model_len),
            eos=_eos(model, tokenizer),
            last_only={"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {},
        )

    def parts(self) -> ModelMap:
        """Return where its tensors are.

        Raises:
            CaptureError: they cannot be told apart.
        """
        return ModelMap.of(self.model, self.layers, self.width)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of a prompt, with the marks that the tokenizer begins a text with."""
        return tuple(self.own_tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens, marks such as the end of text left out."""
        text: str = self.own_tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def new_cache(self) -> DynamicCache:
        """Return an empty cache for one request."""
        return DynamicCache(config=self.model.config)

    def forward(self, token_ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """Compute some more tokens of a request; return the logits after the last one, float32 on the CPU [vocabulary].

        Args:
            token_ids: the next ones that the cache does not hold.
            cache: of the request; holds them afterwards.
        """
        with torch.inference_mode():
            ids = torch.tensor([token_ids], device=self.device)
            output = self.model(input_ids=ids, past_key_values=cache, use_cache=True, **self.last_only)
            logits: torch.Tensor = output.logits[0, -1].to(device="cpu", dtype=torch.float32)
        return logits


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


def _attention(config: Any) -> str | None:  # noqa: ANN401 - a configuration of transformers
    """Return the attention that computes what the model was trained with, None where any does.

    Gemma 2 caps its attention scores. The default of `transformers` leaves that out without a word.
    """
    return "eager" if getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) else None


def _max_model_len(config: Any, wanted: int | None) -> int:  # noqa: ANN401 - a configuration of transformers
    own = getattr(config, "max_position_embeddings", None)
    if wanted is not None and own is not None and wanted > own:
        raise ConfigError(f"engine argument max_model_len is {wanted}; the model has positions for {own}")
    return int(wanted or own or _DEFAULT_MAX_MODEL_LEN)


def _eos(model: Any, tokenizer: Any) -> frozenset[int]:  # noqa: ANN401 - of transformers
    found = getattr(model.generation_config, "eos_token_id", None)
    ids = list(found) if isinstance(found, list | tuple) else [found]
    return frozenset(int(token) for token in [*ids, tokenizer.eos_token_id] if token is not None)
