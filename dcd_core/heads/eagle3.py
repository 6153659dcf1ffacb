"""The EAGLE3 draft head [Li et al. 2025, arXiv 2503.01840]: a decoder block (or a few) on fused features of the expert.

Two ways to run it, held equal by a test:

* :meth:`Eagle3Head.step` decodes: new tokens on a :class:`~dcd_core.cache.KVCache`, as a chain or a tree.
* :meth:`Eagle3Head.unroll` runs the drafts of *all* positions of a text in parallel, for training and for replay.

Symbols: token ``x_t``, fused feature ``g_t`` of the position that reads ``x_t``. Row ``t`` pairs ``x_{t+1}`` with
``g_t`` and drafts ``x_{t+2}``; it sits at position (and cache slot) ``t``. Step ``i`` of a draft rooted at row ``t``
pairs the draft's own token and state of step ``i-1`` and sits at position ``t + i``.

The expert's token embedding is frozen and belongs to the expert: methods take embedded tokens, and none of it is saved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dcd_core.cache import KVCache
from dcd_core.errors import UserError
from dcd_core.heads.blocks import Block, FirstBlock, RMSNorm
from dcd_core.heads.packed import Packed
from dcd_core.heads.rope import Rotary, expert_rope
from dcd_core.heads.row_attention import called, recomputed
from dcd_core.models import default_feature_layers


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of a head, and what it was trained to imitate.

    ``feature_layers`` index the expert's ``hidden_states`` (0 = embeddings), i.e. the *inputs* of those layers; None
    when a published head does not say and no expert was at hand. ``num_hidden_layers`` (depth) and
    ``intermediate_size`` (width) are the head's capacity. A head of ``kind`` dual_input also reads
    ``amateur_feature_layers`` of an amateur (:mod:`dcd_core.heads.dual_input`); ``amateur_input`` is what it was given
    in their place in training, if it is a control (:data:`dcd_core.heads.family.INPUTS`). ``train_alpha`` goes with a
    head that is ``aligned_with`` the contrast. ``amateur_identity`` says which amateur was read or imitated in training
    (:func:`dcd_core.model_identity.model_identity`; empty if none was, or it is not known).

    Published heads vary: ``norm_before_residual`` takes the first block's residual after its norm; ``norm_before_fc``
    norms the joined features and ``fc_norm`` each of the three (EAGLE 3.1); ``norm_output`` hands the normed state, not
    the block's output, to the next step (EAGLE 3.1).
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None
    max_position_embeddings: int = 2048
    feature_layers: tuple[int, int, int] | None = None
    num_hidden_layers: int = 1
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    kind: Literal["eagle3", "dual_input"] = "eagle3"
    amateur_hidden_size: int = 0
    amateur_feature_layers: tuple[int, int, int] | None = None
    amateur_input: Literal["dual", "amateur_zeroed", "amateur_shuffled"] = "dual"
    amateur_identity: str = ""
    aligned_with: Literal["expert", "amateur", "contrast"] = "expert"
    train_alpha: float | None = None

    @property
    def input(self) -> str:
        """What it was trained to read, one of :data:`dcd_core.heads.family.INPUTS`."""
        return self.amateur_input if self.kind == "dual_input" else "expert_only"

    @property
    def feature_widths(self) -> tuple[int, int]:
        """Widths of the features that are read: the expert's, and the amateur's (0: none)."""
        return 3 * self.target_hidden_size, 3 * self.amateur_hidden_size

    @classmethod
    def from_expert(
        cls,
        config,
        draft_vocab_size: int,
        feature_layers: tuple[int, int, int],
        layers: int = 1,
        intermediate_size: int | None = None,
    ) -> Eagle3Config:
        """The head shape for an expert of this transformers configuration.

        Args:
            layers, intermediate_size: capacity: decoder blocks, and width of their MLPs (None: the expert's).
        Raises:
            UserError: more draft ids than the expert has, or no block.
        """
        if layers < 1 or (intermediate_size is not None and intermediate_size < 1):
            raise UserError(f"a head has one layer and a width of 1 or more, got {layers} and {intermediate_size}")
        theta, scaling = expert_rope(config)
        if draft_vocab_size > config.vocab_size:
            raise UserError(
                f"the draft vocabulary has {draft_vocab_size} ids but the expert only {config.vocab_size}; "
                "lower draft_vocab_size"
            )
        return cls(
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            intermediate_size=intermediate_size
            or stated(config, 4 * config.hidden_size, "intermediate_size", "ffn_dim"),
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=stated(config, config.num_attention_heads, "num_key_value_heads"),
            head_dim=stated(config, config.hidden_size // config.num_attention_heads, "head_dim"),
            vocab_size=config.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=stated(config, 1e-5, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position_embeddings=config.max_position_embeddings,
            feature_layers=tuple(feature_layers),
            num_hidden_layers=layers,
        )

    def replace(self, **changes) -> Eagle3Config:
        return dataclasses.replace(self, **changes)


def stated(config, otherwise, *names: str):
    """The first of these fields that an expert's configuration states: families name the same thing differently, or
    leave it out. A head is a Llama block whatever its expert is, so any reasonable value will do."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if value), otherwise)


class Eagle3Head(nn.Module):
    """EAGLE3 draft head (see the module docstring).

    Args:
        config: shape.
        d2t: OFFSET of each draft id: expert id = draft id + d2t[draft id]. None (with t2d): the first ids.
        t2d: membership of each expert id in the draft vocabulary.
    Raises:
        UserError: maps that contradict each other or the config (see :func:`check_maps`), or another kind of head.
    """

    kind = "eagle3"

    def __init__(
        self,
        config: Eagle3Config,
        d2t: Int[Tensor, " draft"] | None = None,
        t2d: Bool[Tensor, " vocab"] | None = None,
    ):
        super().__init__()
        if config.kind != self.kind:
            raise UserError(f"this configuration is of a {config.kind} head, not of a head of kind {self.kind}")
        self.config = config
        self.fc = nn.Linear(sum(config.feature_widths), config.hidden_size, bias=False)
        self.midlayer = FirstBlock(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # after all that a head of one block has, so that its initial weights do not depend on the depth
        self.further = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers - 1))
        width, eps = config.target_hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(sum(config.feature_widths), eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(3)) if config.fc_norm else None
        if d2t is None and t2d is None:
            d2t = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
            t2d = torch.arange(config.vocab_size) < config.draft_vocab_size
        check_maps(d2t, t2d, config.draft_vocab_size, config.vocab_size)
        self.register_buffer("d2t", d2t.clone())
        self.register_buffer("t2d", t2d.clone())
        self.rotary = Rotary(
            config.rope_theta, config.rope_scaling, config.head_dim, max(config.max_position_embeddings, 1)
        )

    @classmethod
    def from_expert(
        cls,
        config,
        vocabulary=None,
        feature_layers: tuple[int, int, int] | None = None,
        seed: int = 0,
        output_rows: Float[Tensor, "vocab hidden"] | None = None,
        layers: int = 1,
        intermediate_size: int | None = None,
        **declared,
    ) -> Eagle3Head:
        """A fresh head for an expert.

        Args:
            config: the expert's transformers configuration.
            vocabulary: anything with ``d2t`` and ``t2d``; None takes the expert's whole vocabulary.
            feature_layers: taps as indices of ``hidden_states``; None for EAGLE3's {2, n//2, n-3}.
            seed: of the random initial weights (std .02).
            output_rows: the expert's output layer; its rows of the draft ids initialise ``lm_head``.
            layers, intermediate_size: capacity: decoder blocks, and width of their MLPs (None: the expert's).
            declared: further fields of the configuration, such as ``aligned_with``.
        """
        if feature_layers is None:
            feature_layers = default_feature_layers(config.num_hidden_layers)
        d2t = t2d = None
        if vocabulary is not None:
            d2t, t2d = vocabulary.d2t.long(), vocabulary.t2d.bool()
            # the map counts real ids; the head's table has the expert's (possibly padded) width
            t2d = F.pad(t2d, (0, config.vocab_size - t2d.shape[0]))
        size = config.vocab_size if d2t is None else d2t.shape[0]
        shape = Eagle3Config.from_expert(config, size, feature_layers, layers, intermediate_size)
        head = cls(shape.replace(**declared), d2t, t2d)
        head.initialise(seed, output_rows)
        return head

    @torch.no_grad()
    def initialise(self, seed: int, output_rows: Tensor | None = None) -> None:
        """Seeded weights: linear layers normal with std .02, norms one, ``lm_head`` from the expert's rows if given.

        What reads an amateur starts at zero, so that a head which reads one starts as the head which does not.
        """
        generator = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                drawn = self.config.feature_widths[0] if module is self.fc else module.in_features
                values = torch.empty(module.out_features, drawn).normal_(0.0, 0.02, generator=generator)
                module.weight.zero_()[:, :drawn].copy_(values)
                if module.bias is not None:
                    module.bias.zero_()
        if output_rows is not None:
            self.lm_head.weight.copy_(output_rows[self.target_ids.to(output_rows.device)])

    @property
    def target_ids(self) -> Int[Tensor, " draft"]:
        """Expert id of every draft id, ascending."""
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t

    @property
    def blocks(self) -> list[Block]:
        return [self.midlayer, *self.further]

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def fuse(self, features: Float[Tensor, "batch position features"]) -> Float[Tensor, "batch position hidden"]:
        """The three tapped features (low | mid | high, 3H wide) as one H-wide input."""
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = zip(self.fc_norm, features.chunk(3, dim=-1), strict=True)
            features = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.fc(features)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch draft"]:
        """Draft logits of recurrent states, over draft ids, in at least fp32."""
        logits = self.lm_head(hidden if self.config.norm_output else self.norm(hidden))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        return KVCache(self.config.num_hidden_layers, batch, capacity, self.fc.weight.device)

    @torch.no_grad()
    def step(
        self,
        embeds: Float[Tensor, "batch width hidden"],
        hidden: Float[Tensor, "batch width hidden"],
        cache: KVCache,
        *,
        tree_mask: Bool[Tensor, "batch width columns"] | None = None,
        depths: Int[Tensor, "batch width"] | None = None,
        first_layer: int = 0,
    ) -> Float[Tensor, "batch width hidden"]:
        """One decoding pass over new rows; the caller commits the cache.

        Args:
            embeds: embedded tokens, one further than the states they are paired with.
            hidden: :meth:`fuse` of true features, or states from the step before.
            first_layer: of the cache, where it holds more than this head.
        Returns:
            The recurrent states: the last block's output before the final norm (see :meth:`recurrent`).
        """
        dtype = self.fc.weight.dtype
        embeds, states = embeds.to(dtype), hidden.to(dtype)
        plan = cache.plan(embeds.shape[1], tree_mask, depths)
        tables = self.rotary.tables(plan.positions, dtype)
        for layer, block in enumerate(self.blocks, start=first_layer):
            inputs = block.inputs(embeds, states)
            keys, values = cache.update(*block.self_attn.key_value(inputs, tables), layer)
            query = block.self_attn.query(inputs, tables)
            heads = F.scaled_dot_product_attention(query, keys, values, attn_mask=plan.mask, enable_gqa=True)
            states = block.finish(states, heads)
        return self.recurrent(states)

    def recurrent(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """What the next step and :meth:`logits` read of the last block's output."""
        return self.norm(states) if self.config.norm_output else states

    def unroll(
        self,
        features: Float[Tensor, "batch position features"],
        embeds: Float[Tensor, "batch position hidden"],
        rows: Int[Tensor, "batch row"],
        steps: int,
        next_embeds: Callable[[int, Tensor], Tensor],
        survivors: Callable[[int], Tensor] | None = None,
        packed: Packed | None = None,
        recompute: bool = False,
    ) -> Iterator[Float[Tensor, "batch row hidden"]]:
        """The drafts rooted at ``rows``, all in parallel: yields the recurrent states of steps 0, 1, ... ``steps - 1``.

        Equal to feeding :meth:`step` the true tokens and features up to a row and the same draft tokens afterwards.

        Args:
            features: true features ``g_t`` of the whole text; rows may be right-padded with anything finite.
            embeds: embedded ``x_{t+1}`` for every ``t`` (the last one is never seen by earlier rows).
            rows: roots of each text; repeat any root to fill a batch up.
            next_embeds: ``next_embeds(i, state)`` gives the ``[batch, row, hidden]`` embedded tokens of step ``i >= 1``
                from the state of step ``i - 1``: the ground truth in training, the head's own choice in replay.
            survivors: ``survivors(i)``, asked before that, gives the indices among the rows of step ``i - 1`` that go
                on to step ``i`` (the same in every text); the others are worked on no more. By default all do.
            packed: the texts that stand in the only row one after the other; then all of their roots go on.
            recompute: make what a block keeps for the backward pass again there.
        """
        dtype = self.fc.weight.dtype
        run = recomputed if recompute else called
        places, told, state = self._read(embeds.to(dtype), self.fuse(features), rows, packed, run)
        own: list[list[tuple[Tensor, Tensor]]] = [[] for _ in told]
        shares = packed and packed.roots
        for index in range(steps):
            if index:
                if survivors is not None:
                    kept = survivors(index)
                    places, state = places[:, kept], state[:, kept]
                    own = [[(keys[:, :, kept], values[:, :, kept]) for keys, values in mine] for mine in own]
                tables = self.rotary.tables(places + index, dtype)
                embedded = next_embeds(index, state).to(dtype)
                for block, pair, mine in zip(self.blocks, told, own, strict=True):
                    keys, values, state = run(block.draft, embedded, state, tables, places, pair, [*mine], shares)
                    mine.append((keys, values))
            state = self.recurrent(state)
            yield state

    def _read(
        self, embeds: Tensor, states: Tensor, rows: Tensor, packed: Packed | None, run: Callable
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
        """The text as it is: the roots' places in it, keys and values of every block at every position, and the last
        block's output at the roots."""
        everywhere = packed.positions if packed else torch.arange(states.shape[1], device=states.device)[None]
        tables, told = self.rotary.tables(everywhere, states.dtype), []
        places = everywhere.gather(1, rows) if packed else rows
        for block in self.blocks[:-1]:  # plain causal attention
            all_places = everywhere.expand(states.shape[0], -1)
            *pair, states = run(block.read, embeds, states, tables, all_places, None, packed and packed.texts)
            told.append(tuple(pair))
        # keys are needed at every position, what the last block makes of them only at the roots
        *pair, state = run(self.blocks[-1].read, embeds, states, tables, places, rows, packed and packed.roots)
        return places, [*told, tuple(pair)], state


def check_maps(d2t: Tensor, t2d: Tensor, draft_vocab_size: int, vocab_size: int) -> None:
    """Assert what every reader of a draft vocabulary relies on.

    Raises:
        UserError: ``d2t`` or ``t2d`` has the wrong length or type; ``i + d2t[i]`` is not strictly increasing, leaves
            the vocabulary, or is not exactly the set that ``t2d`` marks.
    """
    if d2t.shape != (draft_vocab_size,) or d2t.dtype != torch.int64:
        raise UserError(f"d2t must be int64 [{draft_vocab_size}], got {d2t.dtype} {list(d2t.shape)}")
    if t2d.shape != (vocab_size,) or t2d.dtype != torch.bool:
        raise UserError(f"t2d must be bool [{vocab_size}], got {t2d.dtype} {list(t2d.shape)}")
    if d2t.is_meta or t2d.is_meta:
        return
    ids = torch.arange(draft_vocab_size, device=d2t.device) + d2t
    if draft_vocab_size > 1 and not bool((ids[1:] > ids[:-1]).all()):
        raise UserError("the draft vocabulary's ids (i + d2t[i]) are not strictly increasing: d2t is damaged")
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        raise UserError(f"the draft vocabulary points outside the {vocab_size} ids of the expert: d2t is damaged")
    marked = t2d.nonzero()[:, 0]
    if marked.shape != ids.shape or not torch.equal(marked, ids):
        raise UserError(
            f"d2t and t2d disagree: t2d marks {marked.shape[0]} ids, d2t maps to {draft_vocab_size}; "
            "both must describe the same draft vocabulary"
        )
