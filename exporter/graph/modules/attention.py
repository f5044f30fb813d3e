"""Attention modules of transformers -> CachedAttention: recognised by what they compute, replaced before the trace.

A module gets random parameters, and random queries, keys and values in the place of its projections. transformers'
attention interface tells what it attends with. The mask's function tells which slots a token sees. The model's rotary
module tells the order of the rotary table. The module's output must equal the output of the operator's reference.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import causal_mask_function, eager_mask

from quantmoe.custom_ops.op import AttentionSpec, ConvSpec, IndexerSpec
from quantmoe.custom_ops.reference import attention as reference
from quantmoe.exporter.graph.standard_attention import NAME, grouped_attention

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
#: an attention implementation without masks, for models of CachedAttention alone
MASKLESS = "quantmoe_cached"
#: the sliding window of a module that is tried
NEAR = 3
#: slots beyond which a window is none
REACH = 1 << 20
#: outputs are sums in f32 in another order, some tens of roundings of 6e-8; scores a hundred times as large as those
#: of the first tokens lose as much more
TOLERANCE = {1.0: 1e-5, 10.0: 1e-3}
#: of a trial: batch, new tokens, tokens in the cache
Sizes = tuple[int, int, int]
#: makes random numbers of a shape
Draw = Callable[..., torch.Tensor]
Made = TypeVar("Made")
Candidate = TypeVar("Candidate")
Judged = TypeVar("Judged")
FAILURES = (TypeError, ValueError, AttributeError, RuntimeError, LookupError)


AttentionInterface.register(MASKLESS, grouped_attention)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Modules whose projections have the same names.

    Attributes:
        fits: whether a module is one of them.
        compare: what it computes, as a model calls it; raises Unlike.
        attach: makes its forward its projections and the node of :meth:`Rows.attend` (attention_inputs.py).
    """

    fits: Callable[[Any], bool]
    compare: Callable[[Any, Called], RecognisedAttention]
    attach: Callable[[Any], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecognisedAttention:
    """The computation of a module.

    Attributes:
        spec: of its node.
        table: the order of cosines in the model's table. "halves" and "pairs" have each cosine twice, below each other
            or side by side. "once" has them as the node does.
        sinks: name of the parameter, "" for none.
        outputs: how many values its forward returns, the output first.
        kind: of the module.
        value_scale: of the values; the node has them without it, and it multiplies the output instead.
        indexer: of the node that selects what each token attends to; None: it attends to all, or as ``selects`` says.
        selects: it attends to what its indexer selects, or a layer's before it.
        pooling: of the node that sums what its compressed keys are made of; None: there is none.
    """

    spec: AttentionSpec
    table: str
    sinks: str
    outputs: int
    kind: Kind
    value_scale: float = 1.0
    indexer: IndexerSpec | None = None
    selects: bool = False
    pooling: ConvSpec | None = None


@dataclasses.dataclass(frozen=True)
class Called:
    """A model's call of a module.

    Attributes:
        arguments: of the module, in a run of the model.
        window: its sliding window, 0 for none; a probe's is :data:`NEAR`.
        table: see :class:`RecognisedAttention`.
    """

    arguments: dict[str, Any]
    window: int
    table: str

    def again(self, sizes: Sizes, draw: Draw) -> tuple[dict[str, Any], list[torch.Tensor], torch.Tensor]:
        """Random arguments for a probe, at positions that it must not look at.

        Returns:
            All but the mask and the cache; tables [batch, new, rotary_size / 2]; the mask [batch, 1, new, past + new].
        """
        batch, new, past = sizes
        given = self.arguments.get("position_embeddings")
        width = given[0].shape[-1] if given else 0
        tables = [draw(batch, new, width if self.table == "once" else width // 2) for _ in range(2)]
        positions = torch.arange(REACH, REACH + new)
        slots, own = torch.arange(past + new), torch.arange(past, past + new)[:, None]
        unseen = (slots > own) | (slots <= own - (NEAR if self.window else past + new))
        mask = torch.zeros(batch, 1, new, past + new).masked_fill(unseen, torch.finfo(torch.float32).min)
        kwargs = {k: v for k, v in self.arguments.items() if not isinstance(v, torch.Tensor | Cache | tuple)}
        kwargs |= {"hidden_states": draw(batch, new, 8)}
        if given:
            kwargs |= {"position_embeddings": tuple(map(REPEAT[self.table], tables))}
        known = {"position_ids": positions.repeat(batch, 1), "cache_position": positions}
        return kwargs | {name: value for name, value in known.items() if name in self.arguments}, tables, mask


@dataclasses.dataclass
class Run:
    """The calls in a run of the whole model: by attention module its arguments, and the modules that made them."""

    arguments: dict[torch.nn.Module, dict[str, Any]] = dataclasses.field(default_factory=dict)
    masks: list[tuple[torch.Tensor, Callable[..., Any]]] = dataclasses.field(default_factory=list)
    tables: list[tuple[Any, torch.nn.Module, dict[str, Any]]] = dataclasses.field(default_factory=list)


class Unlike(Exception):  # noqa: N818
    """Why a module is not CachedAttention."""


def recognise(
    model: torch.nn.Module,
    decoder: torch.nn.Module,
    refusal: Callable[[Any], str],
    *,
    kinds: Sequence[Kind],
    indexer: Callable[[Any, Called], IndexerSpec],
    without: Container[str] = (),
) -> tuple[dict[str, RecognisedAttention], dict[str, str]]:
    """Return what every attention module computes that is CachedAttention; and why the others are not. By module name.

    Args:
        decoder: the part of ``model`` that has the layers.
        refusal: why the target's kernels do not run a node with attributes; "" when they do.
        kinds: of modules to look for. indexer: the node that selects what a module's indexer selects; raises Unlike.
        without: names of modules that are something else.
    """
    named = ((name, m) for name, m in model.named_modules() if name not in without)
    fits = [kind.fits for kind in kinds]
    modules = {n: m for n, m in named if type(m).__name__.endswith("Attention") or any(fit(m) for fit in fits)}
    of = {m: kind for m in modules.values() for kind in kinds if kind.fits(m)}
    fitting = {m: name for name, m in modules.items() if m in of}
    found: dict[str, RecognisedAttention] = {}
    left = {name: "it has other projections than q, k, v and o" for name, m in modules.items() if m not in fitting}
    run, known = _watch(decoder, list(fitting)), dict[str, RecognisedAttention]()
    for module, name in fitting.items():
        try:
            called = Called(run.arguments[module], _window(run, module), _table(run, module))
            alike = repr((signature(module), called.window, called.table))
            if alike not in known:
                known[alike] = of[module].compare(module, called)
                if (own := getattr(module, "indexer", None)) is not None:
                    known[alike] = dataclasses.replace(known[alike], indexer=indexer(own, called))
            nodes = known[alike].indexer, known[alike].spec, known[alike].pooling
            if refused := next((said for node in nodes if node is not None and (said := refusal(node))), ""):
                raise Unlike(refused)
            found[name] = known[alike]
        except Unlike as reason:
            left[name] = str(reason)
    # a layer may take the selection of a layer before, in the form that this one gives it
    if why := next((left[name] for m, name in fitting.items() if name in left and hasattr(m, "indexer")), ""):
        left |= {name: why for name, module in found.items() if module.selects}
    return {name: module for name, module in found.items() if name not in left}, left


def judged(
    modules: Iterable[tuple[str, Any]], judge: Callable[[Any], Judged]
) -> tuple[dict[str, Judged], dict[str, str]]:
    """Return what modules with names compute, as ``judge`` says, and of those for which it raises Unlike why not. By
    name."""
    found: dict[str, Judged] = {}
    left: dict[str, str] = {}
    for name, module in modules:
        try:
            found[name] = judge(module)
        except Unlike as reason:
            left[name] = f"{type(module).__name__}: {reason}"
    return found, left


def once_a_kind(compare: Callable[..., Judged]) -> Callable[..., Judged]:
    """Call a function with the first of modules that are alike, and give its result for the others."""
    known: dict[str, Judged] = {}

    def call(module: Any, *given: Any) -> Judged:
        if (kind := repr(signature(module))) not in known:
            known[kind] = compare(module, *given)
        return known[kind]

    return call


def signature(module: torch.nn.Module) -> list[Any]:
    """Return what tells modules apart that compute differently: types, numbers and the shapes of parameters."""
    found = []
    for name, part in module.named_modules():
        plain = {k: v for k, v in vars(part).items() if isinstance(v, bool | int | float | str) and k != "layer_idx"}
        tensors = {
            k: (v.shape, v.dtype) for k, v in [*part._parameters.items(), *part._buffers.items()] if v is not None
        }
        found.append((name, type(part), plain, tensors))
    return found


def line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _projects(module: torch.nn.Module) -> bool:
    return all(type(getattr(module, name, None)) is torch.nn.Linear for name in PROJECTIONS)


def _watch(decoder: torch.nn.Module, modules: list[torch.nn.Module]) -> Run:
    """Run one token through the model, without numbers."""
    run, hooks = Run(), []

    def attends(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        run.arguments[module] = given = bound(module, args, kwargs)
        if isinstance(tables := given.get("position_embeddings"), dict):  # of several kinds of layers
            given["position_embeddings"] = tables[module.rope_layer_type]

    def turns(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if isinstance(output, tuple) and len(output) == 2:
            run.tables.append((output, module, bound(module, args, kwargs)))

    def mask(*args: Any, mask_function: Callable[..., Any] = causal_mask_function, **kwargs: Any) -> torch.Tensor:
        made = eager_mask(*args, mask_function=mask_function, **kwargs)
        run.masks.append((made, mask_function))
        return made

    with registered(mask, AttentionMaskInterface), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        for module in modules:
            hooks.append(module.register_forward_pre_hook(attends, with_kwargs=True))
        for module in decoder.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                hooks.append(module.register_forward_hook(turns, with_kwargs=True))
        try:
            one = torch.ones(1, 1, dtype=torch.int64)
            decoder(one, attention_mask=one, use_cache=True)
        finally:
            for hook in hooks:
                hook.remove()
    return run


def bound(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a module's forward by name."""
    found = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    del found["self"]
    return {**found, **found.pop("kwargs", {})}


@contextlib.contextmanager
def registered(function: Callable[..., Any], interface: Any = AttentionInterface) -> Iterator[None]:
    """Another function for :data:`NAME` in one of transformers' interfaces."""
    usual = interface._global_mapping[NAME]
    interface.register(NAME, function)
    try:
        yield
    finally:
        interface.register(NAME, usual)


def _window(run: Run, module: torch.nn.Module) -> int:
    """Return the sliding window of a module's mask, 0 for none; of one of chunks, which says so, none, too."""
    mask = run.arguments[module].get("attention_mask")
    if getattr(mask, "chunk_size", 0):
        return 0
    function = next((function for made, function in run.masks if made is mask), None)
    if mask is None or function is None:
        raise Unlike("its mask is not one of transformers' mask interface")

    def visible(slot: int) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.int64)
        return torch.as_tensor(function(zero, zero, torch.tensor(slot), torch.arange(slot + 2))).expand(slot + 2)

    try:
        seen = visible(REACH)
        first = int(seen.int().argmax())
        window = REACH - first + 1 if first else 0
        for slot in {0, 1, 2, *(max(window * n + d, 0) for n in (1, 2, 5) for d in (-2, -1, 0, 1)), 10_007, REACH}:
            slots = torch.arange(slot + 2)
            want = (slots <= slot) & (slots > slot - (window or slot + 1))
            if not torch.equal(visible(slot), want):
                raise Unlike("its mask is no sliding window")
    except FAILURES as error:
        raise Unlike(f"its mask cannot be evaluated: {error}") from None
    return window


def _table(run: Run, module: torch.nn.Module) -> str:
    """Return :attr:`RecognisedAttention.table` of a module."""
    if (given := run.arguments[module].get("position_embeddings")) is None:
        return "once"
    made = next(((maker, args) for output, maker, args in run.tables if _same(output, given)), None)
    if made is None:
        raise Unlike("it has no cosines and sines of a rotary module")
    maker, arguments = made
    positions = {"x": torch.zeros(1, 1, 1), "position_ids": torch.tensor([[0, 1, 7, 1000, 30_011]])}
    try:
        tables = maker(**{name: positions.get(name, value) for name, value in arguments.items()})
    except FAILURES as error:
        raise Unlike(f"its rotary module does not run alone: {error}") from None
    for name, part in TABLES.items():
        if name == "once" or all(torch.equal(REPEAT[name](part(table)), table) for table in tables):
            return name
    raise AssertionError


def _same(output: Any, given: Any) -> bool:
    return isinstance(given, tuple) and len(given) == 2 and all(a is b for a, b in zip(output, given, strict=True))


TABLES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "halves": lambda table: table[..., : table.shape[-1] // 2],
    "pairs": lambda table: table[..., ::2],
    "once": lambda table: table,
}
REPEAT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "halves": lambda table: torch.cat((table, table), -1),
    "pairs": lambda table: table.repeat_interleave(2, -1),
    "once": lambda table: table,
}


class Given(torch.nn.Module):
    """A module in the place of a projection, with a given output."""

    def __init__(self, values: torch.Tensor):
        super().__init__()
        self.values = values

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.values.clone()


class Selection(Given):
    """A module in the place of an indexer, with a given selection [batch, lists or 1, new, slots]."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        return self.values


def random_selection(mask: torch.Tensor, lists: int, draw: Draw) -> tuple[torch.Tensor, np.ndarray]:
    """Return which slots are selected, [batch, lists, new, slots], and lists of those that a token sees, as the node
    has them.

    Args:
        mask: of a trial, [batch, 1, new, slots]. lists: of a token.
    """
    batch, _, new, slots = mask.shape
    own = torch.eye(new, slots, dtype=torch.bool).roll(slots - new, 1)
    chosen = (draw(batch, lists, new, slots) > 0) | own
    chosen[:, :, -1, 0] = False  # or a row attended to all
    places = torch.where(chosen & (mask == 0), torch.arange(slots), REACH).sort(-1).values[..., :-1]
    return chosen, torch.where(places < REACH, places, -1).int().transpose(1, 2).contiguous().numpy()


class Past:
    """A stand-in for a cache, with keys and values of more tokens than a position-dependent factor ignores."""

    def __init__(self, *past: torch.Tensor):
        self.past = past
        self.present: tuple[torch.Tensor, ...] = ()

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, ...]:
        self.present = tuple(torch.cat(pair, 2) for pair in zip(self.past, (key, value), strict=True))
        return self.present

    def get_seq_length(self, *_: Any) -> int:
        return 10 * REACH


def drawing() -> Draw:
    """Return a source of random numbers, equal each time."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(0))


def _compare(module: Any, called: Called) -> RecognisedAttention:
    """Return the CachedAttention that gives what a module gives, on random tokens."""
    draw = drawing()
    probe = probe_of(module, (*PROJECTIONS, "indexer"), draw)
    probe._modules["o_proj"] = torch.nn.Identity()
    probe.selects = getattr(module, "indexer", None) is not None
    if probe.selects:
        vars(probe).pop("forward", None)  # of standard nodes
    probe.features = [getattr(module, name).out_features for name in PROJECTIONS[:3]]
    return agreeing(
        lambda sizes, spread: _try(probe, called, sizes, spread, draw),
        lambda trial: _candidates(probe, trial, called),
        Trial.gives,
    )


def agreeing(
    run: Callable[[Sizes, float], Made],
    candidates: Callable[[Made], Iterable[Candidate]],
    gives: Callable[[Made, Candidate], bool],
    what: str = "CachedAttention",
) -> Candidate:
    """Return the first of the candidates of a trial that gives what all trials give.

    Args:
        run: makes a trial of its sizes and the spread of what is attended to.
        candidates: of the first trial. gives: whether one gives what a trial gave.
        what: the candidates are, for the error.

    Raises:
        Unlike: there is none.
    """
    left: list[Candidate] = []
    for sizes, spread in (((2, 5, 7), 1.0), ((1, 1, 9), 1.0), ((2, 6, 0), 1.0), ((2, 5, 7), 10.0)):
        try:
            trial = run(sizes, spread)
        except FAILURES as error:
            raise Unlike(f"its forward does more than attend: {line(error)}") from None
        left = [candidate for candidate in left or candidates(trial) if gives(trial, candidate)]
        if not left:
            raise Unlike(f"it computes something else than {what}")
    return left[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A run of a probe.

    Attributes:
        qkv, tables, past: what it was given; ``tables`` [batch, new, rotary_size / 2].
        output, present: what it made of them. returned: how many values it returned.
        seen: what it asked for. selected: lists of a token; None: it attends to all.
    """

    probe: Any
    qkv: torch.Tensor
    tables: list[torch.Tensor]
    past: tuple[torch.Tensor, ...]
    spread: float
    output: torch.Tensor
    present: tuple[torch.Tensor, ...]
    returned: int
    seen: Seen
    selected: np.ndarray | None

    def gives(self, found: RecognisedAttention) -> bool:
        """Return whether the operator gives the module's output."""
        spec = found.spec
        batch, new, length = len(self.qkv), self.qkv.shape[1], self.present[0].shape[2]
        norms = [torch.zeros(0)] * 2
        if spec.qk_norm != "none":
            norms = [self.probe.q_norm.weight, self.probe.k_norm.weight]
        sinks = self.seen.s_aux if self.seen.s_aux is not None else torch.full((spec.num_heads,), -torch.inf)
        tables = [table[..., : spec.rotary_size // 2] for table in self.tables]
        rows = np.tile(np.array([0, new, length - new], np.int32), (batch, 1))
        near = dataclasses.replace(spec, sliding_window=NEAR if spec.sliding_window else 0)
        given = gates_to_front(self.qkv, spec) if spec.gated else self.qkv
        qkv, key, value = (t.numpy() for t in (given, self.past[0], self.past[1] / found.value_scale))
        cos, sin, q_norm, k_norm, own = (t.numpy() for t in (*tables, *norms, sinks))
        want = reference(near, qkv, key, value, rows, length, cos, sin, q_norm, k_norm, own, selected=self.selected)
        if found.value_scale != 1:
            want = want[0] * found.value_scale, want[1], want[2] * found.value_scale
        return near_all((self.output, *self.present), want, TOLERANCE[self.spread])


def near_all(found: Iterable[torch.Tensor | np.ndarray], want: Iterable[np.ndarray], tolerance: float) -> bool:
    """Return whether arrays are of the same shapes and near, relative to the largest of each."""
    pairs = [*zip(map(np.asarray, found), want, strict=True)]
    if any(a.shape != b.shape for a, b in pairs):
        return False
    return all(np.abs(a - b).max() <= tolerance * np.abs(b).max() for a, b in pairs if b.size)


class Seen:
    """An attention function that notes what it was asked for."""

    def __init__(self) -> None:
        self.scale, self.heads, self.groups, self.sizes = 0.0, 0, 0, (0, 0)
        self.s_aux: torch.Tensor | None = None

    def __call__(  # noqa: PLR0917  transformers gives them so
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **others: Any
    ) -> Any:
        self.scale, self.s_aux = float(scaling), others.get("s_aux")
        self.heads, self.groups, self.sizes = query.shape[1], key.shape[1], (query.shape[3], value.shape[3])
        return grouped_attention(module, query, key, value, mask, scaling, **others)


def probe_of(module: torch.nn.Module, without: Sequence[str], draw: Draw) -> Any:
    """Return a copy of a module with random parameters and without some parts."""
    probe = copy.copy(module)
    probe._modules = {name: copy.deepcopy(m) for name, m in module._modules.items() if name not in without}
    probe._parameters = dict(module._parameters)
    if "forward" in vars(probe):
        probe.forward = MethodType(vars(probe)["forward"].__func__, probe)
    randomise(probe, draw)
    return probe


def randomise(probe: torch.nn.Module, draw: Draw) -> None:
    """Give all parameters of a probe, which may be without memory, random numbers."""
    for part in probe.modules():
        for name, old in part._parameters.items():
            if old is not None:
                part._parameters[name] = torch.nn.Parameter(draw(old.shape), requires_grad=False)


def _try(probe: Any, called: Called, sizes: Sizes, spread: float, draw: Draw) -> Trial:
    """Run a probe on random tokens. spread: of queries, keys and values."""
    batch, new, past = sizes
    seen = Seen()
    qkv = [spread * draw(batch, new, features) for features in probe.features]
    for name, values in zip(PROJECTIONS[:3], qkv, strict=True):
        probe._modules[name] = Given(values)
    kwargs, tables, mask = called.again(sizes, draw)
    selected = None
    if probe.selects:
        probe._modules["indexer"] = Selection(mask[..., past:] == 0)
    run_probe(probe, seen, kwargs | {"attention_mask": mask[..., past:], "cache": None})  # for the heads
    if probe.selects:
        chosen, selected = random_selection(mask, seen.groups, draw)
        probe._modules["indexer"] = Selection(chosen)
    cache = Past(*(draw(batch, seen.groups, past, size) for size in seen.sizes))
    output, count = run_probe(probe, seen, kwargs | {"attention_mask": mask, "cache": cache})
    return Trial(
        probe=probe,
        qkv=torch.cat(qkv, -1),
        tables=tables,
        past=cache.past,
        spread=spread,
        output=output,
        present=cache.present,
        returned=count,
        seen=seen,
        selected=selected,
    )


def run_probe(probe: Any, seen: Seen, kwargs: dict[str, Any]) -> tuple[torch.Tensor, int]:
    """Return what a probe makes of its arguments, and how many values it returns."""
    with registered(seen), torch.no_grad():
        returned = probe(**kwargs)
    return (returned[0], len(returned)) if isinstance(returned, tuple) else (returned, 1)


def _candidates(probe: Any, trial: Trial, called: Called) -> Iterator[RecognisedAttention]:
    """Yield the nodes that a module may be, the likeliest first."""
    seen, norms = trial.seen, {"none": 0.0}
    sinks = next((name for name, p in probe._parameters.items() if p is not None and p is seen.s_aux), "")
    if seen.s_aux is not None and not sinks:
        return
    weights = [getattr(getattr(probe, name, None), "weight", torch.zeros(0, 0)) for name in ("q_norm", "k_norm")]
    if all(weight.ndim == 1 for weight in weights):
        widths, size = [len(weight) for weight in weights], seen.sizes[0]
        epsilon = next((float(v) for k, v in vars(probe.q_norm).items() if k in ("variance_epsilon", "eps")), 0.0)
        for norm, want in (("row", [seen.heads * size, seen.groups * size]), ("head", [size, size])):
            if widths == want:
                norms = {norm: epsilon} | norms
    turning, scale = 2 * trial.tables[0].shape[-1], _value_scale(probe, trial)
    gated = probe.features[0] == 2 * seen.heads * seen.sizes[0] and len(set(seen.sizes)) == 1
    for (norm, epsilon), rotary in itertools.product(norms.items(), ((turning, 0), (turning, 1), (0, 0))):
        spec = AttentionSpec(
            num_heads=seen.heads,
            kv_num_heads=seen.groups,
            head_size=seen.sizes[0],
            v_head_size=seen.sizes[1],
            scale=float(np.float32(seen.scale)),
            sliding_window=called.window,
            chunk_size=0,
            softcap=0.0,
            rotary_size=rotary[0],
            rotary_interleaved=rotary[1],
            qk_norm=norm,
            norm_epsilon=float(np.float32(epsilon)),
            gated=int(gated),
        )
        yield RecognisedAttention(
            spec=spec, table=called.table, sinks=sinks, outputs=trial.returned, kind=GROUPED, value_scale=scale
        )


def _value_scale(probe: Any, trial: Trial) -> float:
    """Return what multiplies a module's values before they go to the cache: MiMo's attention_value_scale."""
    made = trial.present[1][:, :, trial.past[1].shape[2] :].transpose(1, 2).flatten(2)
    given = trial.qkv[..., -made.shape[-1] :]
    found = float((made * given).sum() / (given * given).sum())
    known = (value for value in (1.0, *vars(probe).values()) if isinstance(value, float))
    return next((value for value in known if abs(value - found) <= 1e-6 * abs(found)), 1.0)


def gates_to_front(qkv: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return the projections of a gated module, each head's gates behind its queries, as the node has them."""
    size = spec.num_heads * spec.head_size
    queries, rest = qkv.split([2 * size, qkv.shape[-1] - 2 * size], -1)
    queries, gates = queries.unflatten(-1, (spec.num_heads, 2, spec.head_size)).unbind(-2)
    return torch.cat((gates.flatten(-2), queries.flatten(-2), rest), -1)


def _attach(module: Any) -> None:
    norms = ((getattr(module, name, None), "weight") for name in ("q_norm", "k_norm"))
    for part, name in (*norms, (module, module.found.sinks)):
        if part is not None and (old := part._parameters.get(name)) is not None:
            wide = old.data.flatten()[:1].float().expand(old.shape)  # a placeholder as it was; the node takes f32
            part._parameters[name] = torch.nn.Parameter(wide, requires_grad=False)
    module.forward = MethodType(_forward, module)


def projected(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Return queries, keys and values of a module that has q_proj, k_proj and v_proj, or one linear of them."""
    if hasattr(module, "qkv_proj"):
        found: torch.Tensor = module.qkv_proj(x)
        return found
    return torch.cat([getattr(module, name)(x) for name in PROJECTIONS[:3]], -1)


def _forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    given = bound(self, args, kwargs)
    cache, spec = given["cache"], self.found.spec
    qkv = projected(self, given["hidden_states"])
    if spec.gated and not self.gates_first:
        qkv = gates_to_front(qkv, spec)
    norms = [self.q_norm.weight, self.k_norm.weight] if spec.qk_norm != "none" else []
    sinks = getattr(self, self.found.sinks) if self.found.sinks else None
    tables = given.get("position_embeddings") or [qkv[..., :0]] * 2
    selection = self.rows.select(self, given) if self.found.indexer is not None else ()
    output = self.rows.attend(self, qkv, cache, tables=tables, norms=norms, sinks=sinks, selection=selection)
    if self.found.value_scale != 1:
        output = output * self.found.value_scale
    return (self.o_proj(output), *[None] * (self.found.outputs - 1))


GROUPED = Kind(_projects, _compare, _attach)
