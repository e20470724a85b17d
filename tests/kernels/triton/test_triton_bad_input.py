"""Wrong dtypes, strides, devices and shapes are told by name, for every entry of every kernel, before any launch."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from membound.kernels.triton import meta, production, production_linear  # noqa: E402
from membound.kernels.triton.block_copy import BlockPools  # noqa: E402
from membound.kernels.triton.launch import recording  # noqa: E402
from membound.kernels.triton.machine import REFERENCE_MACHINES  # noqa: E402

SM90 = REFERENCE_MACHINES["sm90"]
NO_ENTRIES = ("launches", "recording", "step_of")
# What an entry does not read of a batch or a routing that it is given.
UNREAD = {
    "moe_linear": ("routing.experts", "routing.weights", "routing.probabilities"),
    "count_routed": ("routing.experts", "routing.weights", "routing.order"),
    "moe_combine": ("routing.experts", "routing.order", "routing.offsets", "routing.probabilities"),
    "kivi_attention": ("batch.positions", "batch.slots", "batch.tree"),
    "kivi_round": ("batch.positions", "batch.slots", "batch.tree"),
}


def entries():
    """The functions that launch kernels, by name, and how the cases of serving call each of them first."""
    listed = (production, production_linear)
    functions = {
        name: (module, value)
        for module in listed
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__.startswith("membound.kernels.triton.")
        and value.__module__ not in [one.__name__ for one in (*listed, meta)] and name not in NO_ENTRIES
    }  # fmt: skip
    calls = {}
    with pytest.MonkeyPatch.context() as patch, recording(SM90):
        for name, (module, function) in functions.items():

            def listing(*args, _name=name, _function=function, **kwargs):
                bound = inspect.signature(_function).bind(*args, **kwargs)
                calls.setdefault(_name, []).append((_function, dict(bound.arguments)))
                return _function(*args, **kwargs)

            patch.setattr(module, name, listing)
        for case in production.CASES.values():
            case()
    assert set(calls) == set(functions), "an entry that no case of serving calls"
    return calls


ENTRIES = entries()


def leaves(name, arguments):
    """Each tensor of the arguments, by the words that an error says of it."""
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor):
            yield argument, (argument,)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                path = f"{argument}.{field.name}"
                if isinstance(getattr(value, field.name), torch.Tensor) and path not in UNREAD.get(name, ()):
                    yield path, (argument, field.name)


def with_leaf(arguments, path, change):
    argument, *field = path
    value = arguments[argument]
    changed = dataclasses.replace(value, **{field[0]: change(getattr(value, field[0]))}) if field else change(value)
    return {**arguments, argument: changed}


def of_another_type(tensor):
    wider = {torch.float64: torch.float32, torch.int16: torch.int32}
    return tensor.to(wider.get(tensor.dtype, torch.float64 if tensor.dtype.is_floating_point else torch.int16))


def with_gaps(tensor):
    """The same shape, in which the last dimension is not dense."""
    return tensor.new_empty(*tensor.shape, 2)[..., 0]


def elsewhere(tensor):
    """On another device than the others; it takes no memory."""
    return torch.empty((), dtype=tensor.dtype).expand(tensor.shape)


def of_another_rank(tensor):
    return tensor.unsqueeze(0)


def fits_as_well(arguments, path, change):
    """A dimension of one has no gaps, and neither has a single number."""
    value = arguments[path[0]]
    tensor = getattr(value, path[1]) if path[1:] else value
    return change is with_gaps and (tensor.dim() == 0 or tensor.shape[-1] == 1)


CHANGES = [of_another_type, with_gaps, elsewhere, of_another_rank]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_no_kernel_can_read_is_a_value_error_that_names_its_argument(change):
    wrong = []
    for name, calls in ENTRIES.items():
        for function, arguments in calls:
            tensors = list(leaves(name, arguments))
            for words, path in tensors:
                if (len(tensors) == 1 and change is elsewhere) or fits_as_well(arguments, path, change):
                    continue
                try:
                    with recording(SM90):
                        function(**with_leaf(arguments, path, change))
                except ValueError as error:
                    argument, colon, _ = str(error).partition(": ")
                    if not colon or " " in argument:
                        wrong.append((name, words, f"ValueError: {error}"))
                except Exception as error:
                    wrong.append((name, words, f"{type(error).__name__}: {error}"))
                else:
                    wrong.append((name, words, "nothing is raised"))
    assert not wrong, "\n".join(map(str, dict.fromkeys(wrong)))


ATTENTIONS = [name for name in ENTRIES if name.endswith("attention")]


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(ATTENTIONS), heads=st.integers(1, 70))
def test_heads_that_no_kv_heads_share_evenly_are_told_of_q(name, heads):
    function, arguments = ENTRIES[name][0]
    q, kv_heads = arguments["q"], arguments["kv"].kv_heads
    other = q.new_empty(q.shape[0], heads, q.shape[2])
    if heads % kv_heads == 0:
        return
    with recording(SM90) as record, pytest.raises(ValueError, match=rf"^q: {heads} heads are not a multiple of"):
        function(**{**arguments, "q": other})
    assert not record.launches


@pytest.mark.parametrize(
    ("change", "argument"),
    [(lambda pairs: pairs.int(), "pairs"), (lambda pairs: pairs[:, :1], "pairs"), (lambda pairs: pairs.t(), "pairs")],
)
def test_blocks_are_copied_by_pairs_alone(change, argument):
    with recording(SM90):
        pools = BlockPools([torch.empty(8, 16, 2, 16, dtype=torch.bfloat16, device="meta") for _ in range(2)])
        with pytest.raises(ValueError, match=rf"^{argument}: "):
            pools.copy(change(torch.empty(3, 2, dtype=torch.int64, device="meta")))
