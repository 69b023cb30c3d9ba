"""Types that the signatures name."""

from typing import Any, List, Literal, NamedTuple, Optional, Sequence, Tuple, TypedDict, Union

# A NumPy array, a torch tensor, or any other object with __dlpack__ or the buffer protocol.
Array = Any
# "f32", "bf16", numpy.float32, ml_dtypes.bfloat16, torch.float16, ...
DTypeLike = Any
# "cpu", "cuda", "cuda:1", torch.device("cuda")
DeviceLike = Any
IntegersLike = Union[Sequence[int], Array]

Alignment = Literal["bottom_right", "top_left"]
ContextScheme = Literal["auto", "all_gather", "ring", "ulysses"]
Framework = Literal["numpy", "torch"]
GradientName = Literal["dq", "dk", "dv", "dbias", "dsinks"]
HeadGrouping = Literal["best", "consecutive"]
HeadMerge = Literal["pca", "mean", "first"]
IsaName = Literal["reference", "baseline", "avx2", "avx512", "avx512_bf16", "amx"]
LatentForm = Literal["auto", "expanded", "absorbed"]
QkNormSpan = Literal["head", "all_heads", "each_head"]
RopeChoice = Literal["score_error", "energy", "each_frequency"]
RopeLayout = Literal["half_split", "interleaved"]
RopeScalingKind = Literal["none", "linear", "llama3", "yarn", "dynamic", "longrope"]
ScoreStage = Literal["scaled", "softcapped", "masked", "probability", "dropped"]


class AttentionGradients(NamedTuple):
    """What attention_backward() returns; None for what was not wanted or has no input."""

    dq: Any = None
    dk: Any = None
    dv: Any = None
    dbias: Any = None
    dsinks: Any = None


class ContextPlan(NamedTuple):
    """Who owns which tokens, and how ranks exchange them: the same on every rank.

    queries and keys have a list for each rank: its ranges (begin, end), ascending. kv_heads_at_once: KV heads
    that "all_gather" holds at once; 0 chooses.
    """

    queries: List[List[Tuple[int, int]]]
    keys: List[List[Tuple[int, int]]]
    scheme: ContextScheme = "auto"
    kv_heads_at_once: int = 0


class RopeScaling(TypedDict, total=False):
    """How rope's frequencies are stretched."""

    kind: RopeScalingKind
    factor: float
    original_context: float
    low_frequency_factor: float
    high_frequency_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: Optional[float]
    mscale: float
    mscale_all_dim: float
    context: int
    short_factors: Sequence[float]
    long_factors: Sequence[float]


class RopeOptions(TypedDict, total=False):
    """Rope of a layer.

    frequencies, one for each pair, and magnitude stand instead of base and scaling.
    """

    layout: RopeLayout
    rotary_dim: int
    base: float
    scaling: Optional[RopeScaling]
    frequencies: Union[Sequence[float], Array, None]
    magnitude: float
