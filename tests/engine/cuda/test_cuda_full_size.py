"""Published models at full size through the fused program, on tensors without memory: what would be launched, and
that every launch is one that the kernels accept. Nothing is computed."""

from __future__ import annotations

import itertools
import math
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from sinew_perf.memory import stream_memory
from sinew_perf.program import PublishedProgram, preset
from sinew_perf.request import TracedRequest
from sinew_perf.trace import TracedAttention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sinew.bundle.schema import Normalization, Processing, PromptRecipe
from sinew.engine.clone import on_meta
from sinew.engine.cuda.fp8.scales import linears
from sinew.engine.cuda.fused.fuse import ON_CUDA, fuse
from sinew.engine.cuda.fused.launches import Kernels
from sinew.engine.cuda.graphs import Calls
from sinew.engine.cuda.kernels import Workspace, packed_attention, splitk_linear, tiles
from sinew.engine.cuda.kernels.launch import Launch, Tile
from sinew.engine.cuda.kernels.tiles import default, has_work
from sinew.engine.cuda.lowbit.weights import keep_codes
from sinew.engine.cuda.options import CudaOptions
from sinew.engine.cuda.program import ApartHead, Key, PrefixProgram, Program, tensors_of
from sinew.engine.plan.plan import Plan
from sinew.layers.linear import Linear, hold, width_of
from sinew.layers.stores.codes import codes
from sinew.steps.image.base import ImageRecipe
from sinew.steps.image.letterbox import Letterbox
from tests.covering import pairs, some

pytest.importorskip("triton")
pytestmark = pytest.mark.kernels  # of GPUs alone; the rungs' actions are compared in test_cuda_engine.py
META = torch.device("meta")
IDENTITY = Normalization("identity")


def idle(launch: Launch) -> int:
    """Programs of a launch that have neither depth nor keys to multiply, by the arguments that the kernel gets."""
    has = launch.arguments
    if "SPLIT" not in has or len(launch.grid) < 2:  # the parts of attention are joined by whole rows
        return 0
    tiles, split, *observations = launch.grid
    extent, size = (has["K"], has["BLOCK_K"]) if "K" in has else (has["P"], has["BLOCK_N"])
    blocks = math.ceil(math.ceil(extent / size) / split)  # of each program, as in the kernels
    without = [part for part in range(split) if part * blocks * size >= extent]
    if has.get("own_k") is not None:
        without = [part for part in without if part < split - 1]
    return tiles * len(without) * math.prod(observations)


seen: list[tuple[str, Launch]] = []  # every launch and its kernel, in their order


@pytest.fixture
def launches(monkeypatch) -> Counter[str]:
    """Of every kernel. Launches are made, with all of their checks, and none is run."""
    counted: Counter[str] = Counter()
    seen.clear()

    def count(launch: Launch) -> None:
        assert all(size > 0 for size in launch.grid)
        assert not idle(launch), f"{idle(launch)} of {launch.grid} programs: {launch.tile}"
        kernel = getattr(launch.kernel, "fn", launch.kernel)
        name = kernel.__name__.removesuffix("_kernel")
        counted[name] += 1
        seen.append((name, launch))

    monkeypatch.setattr(Launch, "__call__", count)
    return counted


def program(
    name: str,
    views: int,
    tokens: int,
    side: int,
    ops: Kernels,
    dtype: torch.dtype = torch.bfloat16,
    fp8: tuple[str, ...] = (),
    lowbit: str = "",
    batch: int = 1,
) -> Program:
    """lowbit: the format of all linear layers that `sinew quantize` rounds, which then stay low-bit."""
    model = on_meta(preset(name).model)  # the preset is shared by all tests
    for part, parameter in model.named_parameters():
        if part.split(".")[0] not in model.float32_modules:
            parameter.data = parameter.data.to(dtype)
    for part, layer in model.named_modules():
        if (
            lowbit
            and width_of(layer)
            and isinstance(layer, Linear)
            and part.split(".")[0] not in model.float32_modules
        ):
            form = "int8" if layer.in_features % 32 else lowbit
            hold(layer, codes(form, layer.in_features, layer.out_features if form == "int8" else 0))
    keep_codes(model, dtype)
    plan = Plan.of(model, rewrites=ON_CUDA)
    plan = fuse(plan, ops, fp8, dict.fromkeys(linears(plan.model, fp8), 1.0))
    key = Key(views, ((480, 640),) * views, tokens, 10, batch)
    return Program(key, plan, ops, processing_of(side), Calls(), META)


def processing_of(side: int) -> Processing:
    """As the published checkpoints have it: openpi's resize for 224, LeRobot's for 512."""
    exact, pad = ("pil_bilinear", "center") if side == 224 else ("bilinear", "top_left")
    prompt = PromptRecipe(max_tokens=256, vocab_size=100, pad_token_id=0)
    image = ImageRecipe(side, side, (Letterbox(side, side, exact, pad),))
    return Processing(image, prompt, IDENTITY, IDENTITY, 32, 32)


@pytest.fixture
def architecture(monkeypatch):
    def pretend(capability: int) -> None:
        monkeypatch.setattr(tiles, "capability", lambda device: capability)

    return pretend


# Every model, with the measured tiles and with those of all other GPUs; one of the pairs is slow.
RUN = {("pi0.5", 90), ("pi0", 80), ("smolvla", 90)}
MODELS = (("pi0.5", 3, 200, 224, 18), ("pi0", 2, 16, 224, 18), ("smolvla", 2, 48, 512, 16))
PAIRS = [
    pytest.param(*model, capability, marks=() if (model[0], capability) in RUN else pytest.mark.slow)
    for model in MODELS
    for capability in (80, 90)
]


@pytest.mark.parametrize(("name", "views", "tokens", "side", "layers", "capability"), PAIRS)
@torch.no_grad()
def test_every_launch_of_a_chunk_is_accepted(
    launches, architecture, name, views, tokens, side, layers, capability
):
    architecture(capability)
    made = program(name, views, tokens, side, Kernels(META))
    made.chunk()
    language, head = layers - 1, 10 * layers  # the last language layer leaves its keys and values alone
    vision = len(made.model.vision.layers)
    joined = head if name != "smolvla" and capability == 90 else 0
    # Beyond 256 rows a language layer's products are the library's, with passes between them: pi0.5 has 968, pi0 528,
    # SmolVLA 177. The norm of what no kernel's product wrote is a pass of its own too: SmolVLA's first language input,
    # and what is behind pi0's state.
    whole = language if name == "smolvla" else 0  # layers with the products in the kernels
    apart = language - whole
    own_norms = {"pi0.5": 0, "pi0": 20, "smolvla": 1}[name] + (2 * apart + 1 if apart else 0)
    assert launches == Counter(join=joined) + Counter(
        {
            "row_norm": 2 * vision + 1 + own_norms,
            "activate": vision + apart,
            "preprocess": 1,
            "rope": apart + 1 if apart else 0,
            "qkv_rope": head + (0 if apart else language + 1),
            "packed_attention": language + head,
            "gated_mlp": whole + head,
            "splitk_linear": 2 * (whole + head) + 10,
            "norm_linear": 10 if name == "pi0.5" else 20,
        }
    )
    # pi0's state token and SmolVLA's, and its causal chunk, have masks of their own; its cross layers have not.
    key_masks = sum(bool(each.arguments.get("KEY_MASK")) for _, each in seen)
    assert key_masks == {"pi0.5": language + head, "pi0": language, "smolvla": 10 * 8}[name]
    per_image = {224: 256, 512: 64}[side]
    prefix = views * per_image + tokens + (name == "smolvla")
    actions = made.model.config.chunk_size
    (patches,) = (each.arguments["out"] for kernel, each in seen if kernel == "preprocess")
    assert patches.shape[2] == {224: 592, 512: 768}[side]
    rows = {(kernel, each.arguments.get("M")) for kernel, each in seen}
    assert rows >= {("gated_mlp", actions + (name == "pi0")), ("norm_linear", actions)}
    read = {each.arguments["packed"].shape[0] for kernel, each in seen if kernel == "rope"}
    assert read == {prefix} if apart else ("gated_mlp", prefix) in rows
    # The first layer of the language model has to look for itself. pi0 puts its state before the actions.
    given = Counter(kernel for kernel, each in seen if each.arguments.get("given") is not None)
    assert given == Counter(
        qkv_rope=whole + head - (10 if name == "pi0" else 0),
        gated_mlp=whole + head,
        norm_linear=0 if name == "pi0" else 10,
    )


def test_what_has_work_is_what_the_kernels_see() -> None:
    """The rule by which a tile is split less says what the launches do with their arguments."""
    x, weight, out = (
        torch.empty(50, 720, device=META),
        torch.empty(1024, 720, device=META),
        torch.empty(50, 1024, device=META),
    )
    workspace = Workspace(1 << 24, 1 << 12, META)
    for depth, split in itertools.product((32, 64, 128), range(1, 9)):
        tile = Tile(64, 32, depth, split)
        made = splitk_linear.prepare(x, weight, out, workspace, tile=tile)
        assert has_work("splitk_linear", (50, 1024, 720), tile) == (idle(made) == 0), tile
    q, mask = torch.empty(1, 50, 8, 256, device=META), torch.ones(1, 50, 1018, dtype=torch.bool, device=META)
    cache = torch.empty(2, 1, 1018, 1, 256, device=META)
    kv, own = (cache[0, :, :968], cache[1, :, :968]), (cache[0, :, 968:], cache[1, :, 968:])
    for keys, split in itertools.product((32, 64, 128), range(1, 18)):
        tile = Tile(64, keys, split=split)
        made, *_ = packed_attention.prepare(q, kv, mask, q, workspace, own=own, tile=tile)
        assert has_work("packed_attention", (400, 968, 50, 1, 256), tile) == (idle(made) == 0), tile


def test_a_short_problem_is_split_less() -> None:
    """As far as there is work; 1,100 keys without own ones are 18 blocks of 64, of which 9 programs take two."""
    for keys, parts in ((16, 1), (513, 9), (968, 16), (1100, 9)):
        assert default("packed_attention", (400, keys, 0, 1, 256), torch.bfloat16, 90).split == parts, keys
    assert default("splitk_linear", (50, 720, 32), torch.bfloat16, 90).split == 1


def test_few_rows_are_given_as_many_programs_as_there_are_multiprocessors() -> None:
    for columns, n in ((4096, 32), (2048, 16)):
        assert default("gated_mlp", (50, columns, 1024), torch.bfloat16, 90).n == n, columns
    for columns, depth, n, split in (
        (1024, 4096, 32, 4),
        (1024, 2048, 32, 4),
        (720, 2048, 16, 2),
        (720, 960, 16, 1),
    ):
        tile = default("splitk_linear", (50, columns, depth), torch.bfloat16, 90)
        assert (tile.n, tile.split) == (n, split), (columns, depth)


def test_keys_are_not_split_where_rows_fill_the_device() -> None:
    """968 queries of 8 heads are 121 blocks of 64 rows, 4,000 of 16 heads on 8 are 1,000, whose parts would take more
    memory than a workspace has."""
    assert default("packed_attention", (7744, 968, 0, 1, 256), torch.bfloat16, 90).split == 2
    assert default("packed_attention", (8000, 4000, 0, 8, 128), torch.bfloat16, 90).split == 1


@pytest.mark.parametrize(("name", "layers", "tokens"), [("pi0.5", 18, 200), ("smolvla", 16, 48)])
@torch.no_grad()
def test_fp8_of_the_language_model(launches, architecture, name, layers, tokens):
    """A layer has four inputs. Only the result of its attention is converted in a pass of its own."""
    architecture(90)
    side = 512 if name == "smolvla" else 224
    made = program(name, 2, tokens, side, Kernels(META), fp8=("language",))
    made.chunk()
    language, vision, head = layers - 1, len(made.model.vision.layers), 10 * layers
    assert launches == Counter(join=head if name == "pi0.5" else 0) + Counter(
        {
            "preprocess": 1,
            "row_norm": 2 * vision + 1 + 2 * language + 1,
            "activate": vision + language,
            "fp8_quantize": language,
            "rope": language + 1,
            "packed_attention": language + head,
            "qkv_rope": head,
            "gated_mlp": head,
            "splitk_linear": 2 * head + 10,
            "norm_linear": 10 if name == "pi0.5" else 20,
        }
    )


@pytest.mark.parametrize(("name", "layers", "tokens"), [("pi0.5", 18, 200), ("smolvla", 16, 48)])
@torch.no_grad()
def test_fp8_of_the_mlps_of_the_language_model(launches, architecture, name, layers, tokens):
    """The passes before both products write e4m3, so no input needs a conversion of its own."""
    architecture(90)
    made = program(name, 2, tokens, 512 if name == "smolvla" else 224, Kernels(META), fp8=("language.mlp",))
    made.chunk()
    language, vision, head = layers - 1, len(made.model.vision.layers), 10 * layers
    assert launches["fp8_quantize"] == 0
    assert launches["activate"] == vision + language
    assert launches["gated_mlp"] == head
    # The last language layer has no MLP. SmolVLA's few rows stay in the kernel with the rotation there.
    assert launches["rope"] == language + (name == "pi0.5")


@pytest.mark.parametrize(("name", "layers", "tokens"), [("pi0.5", 18, 200), ("smolvla", 16, 48)])
@torch.no_grad()
def test_low_bit_weights_of_all_components(launches, architecture, name, layers, tokens):
    """Each product of a block is one launch, and the operations around it are those of FP8 without its conversions.
    SmolVLA's expert has rows of 720 numbers and pi0.5's vision tower of 4,304, which are int8: they do not divide into
    groups."""
    architecture(87)
    made = program(name, 2, tokens, 512 if name == "smolvla" else 224, Kernels(META), lowbit="q4_0")
    made.chunk()
    language, vision, head = layers - 1, len(made.model.vision.layers), 10 * layers
    # Cross-attention projects keys and values once for a chunk. The last language layer projects only these.
    products = 4 * (vision + language + head) + 1
    assert launches["weight_only_linear"] >= products
    assert launches["weight_only_linear"] - products <= 2 * layers + 4  # the connector is not a block
    assert launches.keys().isdisjoint({"gated_mlp", "qkv_rope", "fp8_quantize"})
    assert launches["rope"] == language + head + 1
    assert launches["activate"] == language + head + vision
    assert launches["splitk_linear"] == 10  # the way in of a step
    forms = [each.arguments for kernel, each in seen if kernel == "weight_only_linear"]
    assert {(form["NIBBLES"], form["GROUPED"]) for form in forms} == {(True, True), (False, False)}


@torch.no_grad()
def test_float32_and_four_views_fit_the_workspace(launches, architecture):
    architecture(90)
    for dtype, views in ((torch.float32, 3), (torch.bfloat16, 4)):
        launches.clear()
        program("pi0.5", views, 200, 224, Kernels(META), dtype).chunk()
        assert sum(launches.values()) == 997 + 10 + 3 * 27 + 2 + 180 * (dtype == torch.bfloat16)


class Memory(TorchDispatchMode):
    """Measures the largest number of bytes of new tensors that exist at the same time. A graph's own memory has about
    this size."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and not func.is_view:
                self.add(each.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        at = storage._cdata
        if at not in self.storages:
            self.storages.add(at)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.remove, at, storage.nbytes())

    def remove(self, at: int, nbytes: int) -> None:
        self.storages.discard(at)
        self.now -= nbytes


BATCHES = [
    pytest.param(*model, capability, marks=() if capability == 90 and model[0] != "pi0" else pytest.mark.slow)
    for model in MODELS
    for capability in (80, 90)
]


@pytest.mark.parametrize(("name", "views", "tokens", "side", "layers", "capability"), BATCHES)
@torch.no_grad()
def test_every_launch_of_a_batch_is_accepted(
    launches, architecture, name, views, tokens, side, layers, capability
):
    """Also by the workspace, whose size does not depend on the batch. The head has 100 rows, then 400."""
    architecture(capability)
    for batch in (2, 8):
        launches.clear()
        made = program(name, views, tokens, side, Kernels(META), batch=batch)
        made.chunk()
        assert made.x.shape == (batch, *made.model.noise_shape)
        assert launches["packed_attention"] == layers - 1 + 10 * layers
        products = 10 * layers if batch == 2 else 0  # kernels with the head's products; else the library's
        assert launches["gated_mlp"] == products
        grids = {launch.grid[2] for kernel, launch in seen if kernel == "packed_attention"}
        assert grids == {batch}
        seen.clear()


NARROW = ({"lowbit": "q4_0"}, {"lowbit": "int8"}, {"fp8": ("language",)}, {"fp8": ("language.mlp",)})


@pytest.mark.parametrize(
    ("case", "narrow"), pairs(["pi0.5", "smolvla"], NARROW, ("smolvla", {"lowbit": "q4_0"})), ids=str
)
@torch.no_grad()
def test_every_launch_of_a_low_precision_batch_is_accepted(launches, architecture, case, narrow):
    """Two and four observations launch the products in 8 and 4 bits that one launches, with as many more rows."""
    architecture(90)
    (sizes,) = [each[:4] for each in MODELS if each[0] == case]
    found: dict[int, tuple[Counter[str], Counter[int]]] = {}
    for batch in (1, 2, 4):
        launches.clear()
        seen.clear()
        program(*sizes, Kernels(META), batch=batch, **narrow).chunk()
        rows = Counter(each.arguments["M"] for kernel, each in seen if kernel == "weight_only_linear")
        found[batch] = Counter(launches), rows
        grids = {each.grid[2] for kernel, each in seen if kernel == "packed_attention" and len(each.grid) > 2}
        assert grids <= {batch}
    single, rows = found[1]
    narrow_kernels = ("weight_only_linear", "fp8_quantize")
    assert bool(rows) == ("lowbit" in narrow)
    for batch in (2, 4):
        counts, more = found[batch]
        assert [counts[each] for each in narrow_kernels] == [single[each] for each in narrow_kernels]
        assert more == Counter({batch * m: count for m, count in rows.items()})


@pytest.mark.parametrize(("name", "views", "tokens", "side"), [each[:4] for each in MODELS])
@torch.no_grad()
def test_memory_of_a_stream(monkeypatch, architecture, name, views, tokens, side):
    """`sinew perf fit --stream` counts the memory of the graphs that a stream records.

    The intermediate results are counted in the planned model, which has other operations than the kernels. So their
    count is compared roughly.
    """
    architecture(90)
    monkeypatch.setattr(Launch, "__call__", lambda launch: None)
    whole = program(name, views, tokens, side, Kernels(META))
    plan = SimpleNamespace(model=whole.model, time_embeddings=lambda steps: whole.time_embeddings)
    prefix = PrefixProgram(Key(views, (), tokens, 0), plan, whole.ops, processing_of(side), Calls(), META)
    head = ApartHead(Key(views, (), tokens, 10), plan, Calls(), META, None)
    prefix.recorded("vision").replay()
    head.load(prefix.read())
    head.solution()  # fills the tables that later runs read
    intermediate = 0
    for graph in (prefix.vision, prefix.read, head.solution):
        with TracedAttention(), Memory() as memory:
            kept = graph()  # the results stay
        intermediate += memory.most
        del kept
    context = sum(each.nbytes for each in tensors_of(head.context))
    inputs = [
        *prefix.staging.device.values(),
        *head.staging.device.values(),
        head.x,
        head.x,
        head.time_embedding,
    ]

    request = TracedRequest(cameras=views, prompt_tokens=tokens, steps=10)
    counted = stream_memory(PublishedProgram.load(name, request, dtypes="bf16", engine="plan"))
    print(f"{name}: contexts {counted.contexts / 2**20:.1f} MiB, intermediate {intermediate / 2**20:.0f} MiB")
    assert counted.contexts == pytest.approx(3 * context, rel=0.01)
    assert counted.inputs == pytest.approx(sum(each.nbytes for each in inputs), rel=0.01)
    assert 0.7 * intermediate < counted.intermediate < 1.3 * intermediate


@pytest.mark.parametrize("case", some([each[0] for each in MODELS], "smolvla"))
@torch.no_grad()
def test_memory_of_a_batch(monkeypatch, architecture, case):
    """A graph's memory grows no faster than its batch: docs/gpu.md has the numbers."""
    architecture(90)
    monkeypatch.setattr(Launch, "__call__", lambda launch: None)
    found, (sizes,) = {}, [each[:4] for each in MODELS if each[0] == case]
    for batch in CudaOptions().batches(8):
        made = program(*sizes, Kernels(META), batch=batch)
        made.first_step()  # fills the tables that later runs read
        with TracedAttention(), Memory() as memory:  # attention is one kernel, as on a GPU
            made.first_step()
        found[batch] = memory.most
        inputs = f"inputs {made.staging.nbytes / 2**20:.1f} MiB"
        print(f"{case}, {batch} observations: intermediate results {memory.most / 2**20:.0f} MiB, {inputs}")
    assert all(0.9 * batch * found[1] <= most <= 1.1 * batch * found[1] for batch, most in found.items())
