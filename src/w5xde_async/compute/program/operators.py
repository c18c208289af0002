"""The operators that a program may name: a list that was read line by line, and nothing beside it.

Not in it, on purpose: whatever reads or writes files, starts processes, calls back into Python, changes a storage's
size or offset (``set_``, ``resize_``, ``as_strided``), hands out memory that was not written (``empty``), writes into
an ``out`` argument, takes a generator, a storage or a stream, has outputs whose shape depends on values (``nonzero``,
``masked_select``, ``unique``: their size cannot be known before they run), is quantized, sparse or nested, or is not
``aten``. Names are looked up here and only then in ``torch.ops.aten``; a name from the wire never reaches ``getattr``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

#: ``name: overloads`` of ``torch.ops.aten``, one operator after the other; a bare name has the overload ``default``.
_ATEN = """
abs abs_ acos acosh asin asinh atan atanh ceil cos cosh deg2rad rad2deg digamma erf erf_ erfc erfinv exp exp_ exp2
expm1 floor floor_ frac lgamma log log_ log10 log1p log2 logit neg neg_ reciprocal reciprocal_ round round_ rsqrt
rsqrt_ sigmoid sigmoid_ sign sgn sin sinc sinh sqrt sqrt_ square square_ tan tanh tanh_ trunc positive isnan isinf
isfinite isposinf isneginf logical_not bitwise_not relu relu_ relu6 selu selu_ silu silu_ mish mish_ hardswish
hardswish_ hardsigmoid hardsigmoid_ nan_to_num softplus gelu gelu_ elu elu_ celu celu_ leaky_relu leaky_relu_ prelu
rrelu rrelu_ hardtanh hardtanh_ softshrink hardshrink threshold threshold_ glu log_sigmoid

add:Tensor,Scalar add_:Tensor,Scalar sub:Tensor,Scalar sub_:Tensor,Scalar mul:Tensor,Scalar mul_:Tensor,Scalar
div:Tensor,Scalar,Tensor_mode,Scalar_mode div_:Tensor,Scalar,Tensor_mode,Scalar_mode rsub:Tensor,Scalar
pow:Tensor_Tensor,Tensor_Scalar,Scalar pow_:Scalar,Tensor maximum minimum fmax fmin atan2 fmod:Tensor,Scalar
remainder:Tensor,Scalar floor_divide:default,Scalar true_divide:Tensor,Scalar eq:Tensor,Scalar ne:Tensor,Scalar
lt:Tensor,Scalar le:Tensor,Scalar gt:Tensor,Scalar ge:Tensor,Scalar logical_and logical_and_ logical_or logical_or_
logical_xor bitwise_and:Tensor,Scalar bitwise_or:Tensor,Scalar bitwise_xor:Tensor,Scalar bitwise_and_:Tensor
bitwise_or_:Tensor __and__:Tensor,Scalar __or__:Tensor,Scalar __xor__:Tensor,Scalar hypot logaddexp logaddexp2
xlogy:Tensor,Scalar_Other,Scalar_Self lerp:Scalar,Tensor lerp_:Scalar,Tensor addcmul addcmul_ addcdiv addcdiv_
clamp:default,Tensor clamp_:default,Tensor clamp_min:default,Tensor clamp_min_:default,Tensor clamp_max:default,Tensor
clamp_max_:default,Tensor where:self,ScalarOther,ScalarSelf,Scalar copysign:Tensor,Scalar heaviside
masked_fill:Scalar,Tensor masked_fill_:Scalar,Tensor maximum minimum copy_ fill_:Scalar,Tensor zero_
fill:Scalar,Tensor

sum:default,dim_IntList mean:default,dim prod:default,dim_int amax amin aminmax max:default,dim,other
min:default,dim,other argmax argmin any:default,dim,dims all:default,dim,dims std:default,dim,correction
var:default,dim,correction var_mean:default,dim,correction std_mean:default,dim,correction
norm:Scalar,ScalarOpt_dim,ScalarOpt_dim_dtype,ScalarOpt_dtype linalg_vector_norm logsumexp cumsum cumprod cummax
cummin logcumsumexp topk sort:default,stable argsort:default,stable median:default,dim kthvalue
count_nonzero:default,dim_IntList nansum nanmean

view reshape flatten:using_ints unflatten:int permute transpose:int t mT numpy_T adjoint squeeze:default,dim,dims
unsqueeze expand expand_as broadcast_to broadcast_tensors repeat repeat_interleave:self_int cat concat stack
split:Tensor,sizes split_with_sizes chunk tensor_split:sections,indices unbind:int select:int slice:Tensor narrow
index_select gather take_along_dim index:Tensor scatter:value,src scatter_:value,src scatter_add scatter_add_
scatter_reduce:two index_add index_add_ index_copy index_copy_ index_fill:int_Tensor,int_Scalar index_put index_put_
roll flip rot90 diff tril tril_ triu triu_ diagonal diag_embed diag movedim:int,intlist moveaxis:int,intlist swapaxes
swapdims unfold im2col col2im contiguous clone detach detach_ alias view_as reshape_as
to:device,dtype,other,dtype_layout _to_copy type_as lift_fresh_copy pixel_shuffle pixel_unshuffle channel_shuffle pad
constant_pad_nd hstack vstack dstack column_stack tile meshgrid:default,indexing one_hot ravel select_scatter
slice_scatter bucketize:Tensor

arange:default,start,start_step zeros ones full eye:default,m linspace zeros_like ones_like full_like new_zeros
new_ones new_full scalar_tensor rand randn randint:default,low rand_like randn_like randint_like:default,low_dtype
bernoulli:default,p bernoulli_:float multinomial normal:Tensor_float,float_Tensor,Tensor_Tensor,float_float normal_
randperm uniform_ exponential_

mm matmul bmm addmm baddbmm addbmm mv dot outer einsum linear bilinear tensordot kron addmv addr inner trace
linalg_cross conv1d:default,padding conv2d:default,padding conv3d:default,padding conv_transpose1d
conv_transpose2d:input conv_transpose3d:input convolution batch_norm instance_norm layer_norm group_norm rms_norm
embedding dropout dropout_ feature_dropout alpha_dropout feature_alpha_dropout native_dropout max_pool1d max_pool2d
max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d softmax:int log_softmax:int _softmax _log_softmax
cross_entropy_loss nll_loss nll_loss2d nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits kl_div cosine_embedding_loss cosine_similarity margin_ranking_loss
triplet_margin_loss soft_margin_loss hinge_embedding_loss poisson_nll_loss pairwise_distance
scaled_dot_product_attention lstm:input gru:input rnn_tanh:input rnn_relu:input lstm_cell gru_cell rnn_tanh_cell
rnn_relu_cell upsample_nearest1d:default,vec upsample_nearest2d:default,vec upsample_nearest3d:default,vec
upsample_linear1d:default,vec upsample_bilinear2d:default,vec upsample_bicubic2d:default,vec
upsample_trilinear3d:default,vec
"""

#: Every allowed overload, as it stands on the wire: ``add.Tensor``.
NAMES: frozenset[str] = frozenset(
    f"{name}.{overload}"
    for entry in _ATEN.split()
    for name, _, overloads in (entry.partition(":"),)
    for overload in (overloads or "default").split(",")
)

DTYPES: Mapping[str, torch.dtype] = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32,
    "int64": torch.int64, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float64": torch.float64,
}  # fmt: skip
LAYOUTS: Mapping[str, torch.layout] = {"strided": torch.strided}
MEMORY_FORMATS: Mapping[str, torch.memory_format] = {
    "contiguous": torch.contiguous_format, "preserve": torch.preserve_format, "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}  # fmt: skip

#: Values of string arguments, by the argument's name. An einsum equation is checked by its characters instead.
STRINGS: Mapping[str, frozenset[str]] = {
    "approximate": frozenset(("none", "tanh")),
    "rounding_mode": frozenset(("trunc", "floor")),
    "padding": frozenset(("valid", "same")),
    "mode": frozenset(("constant", "reflect", "replicate", "circular")),
    "indexing": frozenset(("ij", "xy")),
    "reduce": frozenset(("sum", "prod", "mean", "amax", "amin")),
}

_MAX_NUMBER = 1 << 63


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an operator. ``kind``: the schema's type without ``Optional``."""

    name: str
    kind: str
    optional: bool
    keyword: bool
    default: bool
    writes: bool
    aliases: bool

    @property
    def takes_tensors(self) -> bool:
        """Whether it is a tensor, several, or several results."""
        return "Tensor" in self.kind or self.kind == "results"


@dataclass(frozen=True, slots=True)
class Operator:
    """One allowed operator. ``results``: the schema's types of what it returns."""

    name: str
    call: Callable[..., Any]
    parameters: tuple[Parameter, ...]
    results: tuple[str, ...]

    @property
    def base(self) -> str:
        """Its name without the overload."""
        return self.name.partition(".")[0]

    @property
    def aliases(self) -> bool:
        """Whether a result may be a view of an argument."""
        return any(parameter.aliases and not parameter.writes for parameter in self.parameters)

    @property
    def makes_tensors(self) -> bool:
        """Whether it makes tensors out of none, on a device that it is told."""
        kinds = {parameter.kind for parameter in self.parameters}
        return "Device" in kinds and "Tensor" not in kinds

    @property
    def takes_tensors(self) -> bool:
        """Whether tensors are among its arguments."""
        return any(parameter.takes_tensors for parameter in self.parameters)


def _number(value: Any) -> Any:
    if type(value) is bool or type(value) is float:
        return value
    if type(value) is not int or not -_MAX_NUMBER <= value < _MAX_NUMBER:
        raise ValueError(f"a size of {str(value)[:40]}")
    return value


def _calculation(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *operands: _number(function(*[_number(operand) for operand in operands]))


def _item(values: Any, index: int) -> Any:
    if not isinstance(values, (tuple, list)) or not 0 <= index < len(values):
        raise ValueError(f"result {index} of {len(values) if isinstance(values, (tuple, list)) else 'one'}")
    return values[index]


def _require(holds: Any) -> None:
    if not holds:
        raise ValueError("a condition on sizes that the program states does not hold")


#: Calculations with sizes: name on the wire -> (function, number of operands).
_CALCULATIONS: Mapping[str, tuple[Callable[..., Any], int]] = {
    "add": (operator.add, 2), "sub": (operator.sub, 2), "mul": (operator.mul, 2), "mod": (operator.mod, 2),
    "floordiv": (operator.floordiv, 2), "truediv": (operator.truediv, 2), "neg": (operator.neg, 1),
    "eq": (operator.eq, 2), "ne": (operator.ne, 2), "lt": (operator.lt, 2), "le": (operator.le, 2),
    "gt": (operator.gt, 2), "ge": (operator.ge, 2), "max": (max, 2), "min": (min, 2), "float": (float, 1),
    "sqrt": (math.sqrt, 1), "and": (operator.and_, 2), "or": (operator.or_, 2), "not": (operator.not_, 1),
}  # fmt: skip

SET_GRAD = "set_grad"
#: (number of calls, whether random numbers are drawn again, whether reentrant): that many calls from here on are one
#: region, whose activations are not kept (``checkpointing``). It is not called itself.
RECOMPUTE = "recompute"


def _scalar(name: str, call: Callable[..., Any], kinds: tuple[str, ...], results: tuple[str, ...]) -> Operator:
    parameters = tuple(
        Parameter(f"operand{i}", kind, False, False, False, False, name == "item") for i, kind in enumerate(kinds)
    )
    return Operator(name, call, parameters, results)


def _size(tensor: Tensor, dim: int) -> int:
    return tensor.size(dim)


#: Operators of our own, by name: sizes, calculations with them, parts of results, and where gradients are recorded.
SCALARS: Mapping[str, Operator] = {
    **{
        name: _scalar(name, _calculation(function), ("number",) * count, ("number",))
        for name, (function, count) in _CALCULATIONS.items()
    },
    "size": _scalar("size", _size, ("Tensor", "int"), ("number",)),
    "numel": _scalar("numel", Tensor.numel, ("Tensor",), ("number",)),
    "require": _scalar("require", _require, ("number",), ()),
    "item": _scalar("item", _item, ("results", "int"), ("Tensor",)),
    SET_GRAD: _scalar(SET_GRAD, torch.set_grad_enabled, ("bool",), ()),
    RECOMPUTE: _scalar(RECOMPUTE, lambda *_: None, ("int", "bool", "bool"), ()),
}


#: They may return their argument itself, or views of it, without saying so in their schema.
_MAY_ALIAS = frozenset((
    "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "broadcast_tensors", "meshgrid", "einsum",
    "type_as", "pixel_shuffle", "pixel_unshuffle", "channel_shuffle",
))  # fmt: skip


def _writes(argument: Any) -> bool:
    # Batch norm's own kernels change its statistics without saying so.
    info = argument.alias_info
    return (info is not None and info.is_write) or argument.name in ("running_mean", "running_var")


@cache
def find(name: str) -> Operator | None:
    """The operator of a name on the wire; None where it is not on the list, or this torch does not have it."""
    own = SCALARS.get(name)
    if own is not None or name not in NAMES:
        return own
    base, overload = name.split(".")  # from here on the name is one of the constants above
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or overload not in packet.overloads():
        return None
    call: Any = getattr(packet, overload)
    schema = call._schema
    parameters = []
    for argument in schema.arguments:
        kind = str(argument.real_type)
        optional = kind.startswith("Optional[")
        info = argument.alias_info
        parameters.append(
            Parameter(
                argument.name, kind[len("Optional[") : -1] if optional else kind, optional, argument.kwarg_only,
                argument.has_default_value(), _writes(argument), info is not None or base in _MAY_ALIAS,
            )
        )  # fmt: skip
    results = tuple(str(result.real_type) for result in schema.returns)
    return Operator(name, call, tuple(parameters), results)


@cache
def name_of(target: Any) -> str | None:
    """The name on the wire of a traced call; None where it may not travel."""
    if isinstance(target, torch._ops.OpOverload):
        name = _TRAVELS_AS.get(str(target)) or str(target).removeprefix("aten.")
        return name if str(target).startswith("aten.") and find(name) is not None else None
    return _OF_PYTHON.get(target)


_sym_sqrt: Any = getattr(torch, "_sym_sqrt", math.sqrt)
_TRAVELS_AS = {
    "aten.sym_size.int": "size", "aten.sym_numel.default": "numel", "aten._assert_scalar.default": "require",
    # Memory that the step fills afterwards, as with ``empty_like(x).bernoulli_(p)``.
    "aten.empty.memory_format": "zeros.default", "aten.new_empty.default": "new_zeros.default",
    "aten.empty_like.default": "zeros_like.default",
}  # fmt: skip
_OF_PYTHON: Mapping[Any, str] = {
    **{function: name for name, (function, _) in _CALCULATIONS.items()},
    operator.getitem: "item", torch.sym_max: "max", torch.sym_min: "min", torch.sym_float: "float",
    torch.sym_not: "not", _sym_sqrt: "sqrt",
}  # fmt: skip
