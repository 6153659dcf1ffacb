"""Forms of a method: how they are written, what they change, what is refused."""

import pytest

from dcd_core.errors import UserError
from diagnostics.contest import Entry, arms, refuse_lazy, refuse_lm
from diagnostics.forms import shape_of


def test_a_form_changes_what_it_says():
    assert Entry.parse("cd").changes == {} and Entry.parse("cd").method == "cd"
    tree = Entry.parse("dcd_eagle3@5x4:10+deferred+defer_theta=0.2")
    assert tree.method == "dcd_eagle3" and tree.label == "dcd_eagle3@5x4:10+deferred+defer_theta=0.2"
    assert tree.changes == {"gamma": 5, "branch": 4, "nodes": 10, "saving": "deferred", "defer_theta": 0.2}
    assert Entry.parse("dcd_ngram@3").changes == {"gamma": 3, "branch": 1, "nodes": 0}


@pytest.mark.parametrize(
    "label, message",
    [
        ("dcd", "method 'dcd' is unknown; choose from ar, cd"),
        ("dcd@5", "method 'dcd' is unknown"),
        ("cd@5x4", "'cd@5x4': '5x4' is no form of a method; write DEPTHxBRANCH:NODES"),
        ("cd@late", "'late' is no form of a method"),
        ("cd@gamma=x", "'gamma=x' is no form of a method"),
        ("cd@rule=1", "'rule=1' is no form of a method"),
    ],
)
def test_what_is_no_form_is_refused(label, message):
    with pytest.raises(ValueError, match=message):
        Entry.parse(label)


@pytest.mark.parametrize("label", ["cd@stop_below=2", "cd@defer_most=0"])
def test_values_outside_their_range_are_refused(label):
    with pytest.raises(UserError):
        Entry.parse(label)


def test_methods_without_contrast_run_once():
    entries = [Entry.parse(label) for label in ("ar", "cd", "dcd_ngram@3")]
    found = [(arm.entry.label, arm.alpha) for arm in arms(entries, [0.1, 0.5])]
    assert found == [("ar", None), ("cd", 0.1), ("dcd_ngram@3", 0.1), ("cd", 0.5), ("dcd_ngram@3", 0.5)]


def test_shapes_are_read_without_torch():
    assert shape_of("dcd_eagle3@5x4:10+deferred", 3) == (5, 4, 10)
    assert shape_of("dcd_eagle3@5x4:0", 3) == (5, 4, 20)
    assert shape_of("dcd_eagle3", 3, 2, 7) == (3, 2, 7) and shape_of("dcd_eagle3@lazy", 3) == (3, 1, 3)


@pytest.mark.parametrize(
    "label, reason",
    [
        ("dcd_eagle3@", "names no form after its last sign"),
        ("dcd_eagle3@5x4:10+", "names no form after its last sign"),
        ("dcd_eagle3@5x0:3", "'5x0:3' is no form"),
        ("dcd_eagle3@0", "'0' is no form"),
        ("dcd_eagle3@deferred+lazy", "sets saving twice"),
        ("dcd_eagle3@5+3x2:4", "twice"),
        ("cd@5x4:10", "cd drafts nothing"),
        ("ar@deferred", "ar never asks the amateur"),
        ("dcd_eagle3@100000x1:0", "larger than any that pays"),
    ],
)
def test_odd_labels_are_refused(label, reason):
    with pytest.raises((ValueError, UserError), match=reason):
        Entry.parse(label)


def test_lazy_forms_need_a_cutoff_before_anything_is_loaded():
    entries = [Entry.parse("cd"), Entry.parse("dcd_eagle3@lazy")]
    refuse_lazy(entries, "none", 0.1)
    with pytest.raises(ValueError, match="'dcd_eagle3@lazy' with saving lazy needs --cutoff"):
        refuse_lazy(entries, "none", 0.0)
    with pytest.raises(ValueError, match="'cd' with saving lazy needs --cutoff"):
        refuse_lazy(entries[:1], "lazy", 0.0)
    with pytest.raises(ValueError, match="benchmark.py has --lm"):
        refuse_lm([Entry.parse("dcd_lm")])
