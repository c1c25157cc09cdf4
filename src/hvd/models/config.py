"""What a decoder looks like, whatever file it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, rotate-half layout (as Hugging Face checkpoints have it).

    theta               base of the frequencies
    kind                "default", "linear", "dynamic", "llama3" or "yarn"
    factor              scaling factor of every kind but "default"
    original_positions  context the model was first trained at (llama3, yarn, dynamic)
    low_freq_factor, high_freq_factor                       llama3
    attention_factor, beta_fast, beta_slow, mscale, mscale_all_dim, truncate   yarn (None / 0 = derived)
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer: RMSNorm, rotary attention with grouped queries, gated SiLU MLP.

    family            one of FAMILIES
    vocab_size        rows of the embedding (may exceed the tokenizer's size)
    head_dim          per head, not always hidden_size / num_heads
    context_limit     max_position_embeddings of the checkpoint
    qkv_bias, o_bias, mlp_bias    whether those projections have a bias
    qk_norm           RMSNorm over head_dim on q and k before rope (Qwen3)
    tied              output matrix is the embedding
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_limit: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tied: bool = False

    @property
    def default_aux_layers(self) -> tuple[int, ...]:
        """Layers whose entering hidden states an EAGLE3 head takes unless it says otherwise: 2, L//2, L-3.

        Shallow models (L < 6) get the nearest valid ascending layers.
        """
        layers = self.num_layers
        return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))

    def aux_layers(self, wanted: Sequence[int] | None) -> tuple[int, ...]:
        """Layers whose entering hidden states a pass returns; None = the default ones. ConfigError unless they ascend
        within the model.
        """
        layers = self.default_aux_layers if wanted is None else tuple(wanted)
        if list(layers) != sorted(set(layers)) or any(not 0 <= layer < self.num_layers for layer in layers):
            raise ConfigError(f"aux_layers must ascend within [0, {self.num_layers}), got {layers}")
        return layers
