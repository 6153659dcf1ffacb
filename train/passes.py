"""What training reads of the frozen models: their passes over a batch, made by the models or read from a store."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data_prep.feature_files import ROLES, FeatureStore
from dcd_core.errors import UserError
from dcd_core.heads.packed import moved
from dcd_core.model_identity import model_identity
from dcd_core.models import LanguageModel, Output
from train.batches import Batch, Texts
from train.loop import refuse_non_finite

NAMES = ("the expert", "the amateur")


class Passes:
    """Features and final states of the expert and, if there is one, the amateur.

    Args:
        models: frozen; the expert first.
        store: where the passes of some texts are; every other text goes through the models.
    """

    def __init__(self, models: Sequence[LanguageModel], store: FeatureStore | None = None):
        self.models, self.store = list(models), store

    @torch.no_grad()
    def __call__(self, batch: Batch, features: Sequence[bool] = (True,)) -> list[Output]:
        """Outputs without logits of the first models, as many as ``features`` has entries: whether those are needed.
        The texts stand in one row, one after the other.

        Raises:
            UserError: NaN or inf, naming the texts.
        """
        outputs = self.unchecked(batch, features)
        refuse_non_finite(named_values(outputs), batch)
        return outputs

    @torch.no_grad()
    def unchecked(self, batch: Batch, features: Sequence[bool] = (True,)) -> list[Output]:
        """The same, with whatever numbers there are."""
        # a text without an answer stands for none at all: nothing is trained on it
        stored = self.store is not None and all(
            not spans or ids in self.store for ids, spans in zip(batch.texts, batch.spans, strict=True)
        )
        outputs = []
        for role, model, wanted in zip(ROLES, self.models, features, strict=False):
            if stored:
                output = self.read(batch, role, model, wanted)
            else:
                output = model.forward_full(moved(batch.input_ids, model.device), features=wanted, logits=False)
                output = Output(None, batch.pack(output.features) if wanted else None, batch.pack(output.hidden))
            outputs.append(output)
        return outputs

    def read(self, batch: Batch, role: str, model: LanguageModel, wanted: bool) -> Output:
        """From the store."""
        features, hidden = [], []
        for ids, spans in zip(batch.texts, batch.spans, strict=True):
            if spans:
                taps, states = self.store.read(ids, role, wanted)
            else:
                taps, states = (torch.zeros(len(ids), width * model.hidden_size, dtype=model.dtype) for width in (3, 1))
            features.append(taps)
            hidden.append(states)
        packed = [
            moved(torch.cat(rows)[None], model.device) if rows[0] is not None else None for rows in (features, hidden)
        ]
        return Output(None, *packed)


def named_values(outputs: Sequence[Output]) -> dict[str, Tensor]:
    """All numbers of some passes, by what they are."""
    named = {}
    for name, output in zip(NAMES, outputs, strict=False):
        named |= {f"{name}'s features": output.features, f"{name}'s final states": output.hidden}
    return {name: values for name, values in named.items() if values is not None}


def open_store(folder: str, models: Sequence[LanguageModel], texts: Texts, online: bool) -> FeatureStore:
    """The store of ``--features``, checked against the models and the training texts.

    Raises:
        UserError: it is of other models, taps or dtype, or, unless ``online``, lacks a text.
    """
    store = FeatureStore(folder)
    made = store.record["made"]
    for role, model in zip(("expert", "amateur"), models, strict=False):
        if role not in made:
            raise UserError(f"--features {folder} holds nothing of {role} {model.name}: write it with --{role}")
        found = {"weights": model_identity(model.model), "taps": list(model.feature_layers or ())}
        different = [name for name in found if found[name] != made[role][name]]
        if different:
            why = ", ".join(different)
            raise UserError(f"--features {folder} was made with another {role} than {model.name} ({why} differ)")
        if str(model.dtype).removeprefix("torch.") != made["dtype"]:
            raise UserError(f"--features {folder} holds {made['dtype']}, and --expert_dtype is {model.dtype}")
    lacking = [sample.id for sample in texts.samples if sample.input_ids not in store]
    if lacking and not online:
        raise UserError(
            f"--features {folder} lacks {len(lacking)} of the {len(texts)} training texts (the first: '{lacking[0]}'): "
            "finish it with data_prep/features.py on these token files, or give --online true to pass them through the "
            "models (a text that --max_length cuts is another text)"
        )
    return store
