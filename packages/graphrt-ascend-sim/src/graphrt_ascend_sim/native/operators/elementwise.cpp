// Operators that work element by element; each with its in-place form.

#include "operators/operators.h"

using namespace sim;

#define UNARY_AS(name, expression)                                              \
    OPERATOR(aclnn##name, (In a_, Out out_), (a_, out_),                        \
             [](const Tensor& a, const Tensor& out) { out.copy_(expression); }) \
    OPERATOR(aclnnInplace##name, (Out a_), (a_), [](const Tensor& a) { a.copy_(expression); })
#define UNARY(name, function) UNARY_AS(name, function(a))

#define BINARY_AS(name, inplace_name, type, expression)                                      \
    OPERATOR(name, (In a_, type b_, Out out_), (a_, b_, out_),                               \
             [](const Tensor& a, const auto& other, const Tensor& out) {                     \
                 const auto& b = value_of(other);                                            \
                 out.copy_(expression);                                                      \
             })                                                                              \
    OPERATOR(inplace_name, (Out a_, type b_), (a_, b_), [](const Tensor& a, const auto& other) { \
        const auto& b = value_of(other);                                                     \
        a.copy_(expression);                                                                 \
    })
#define BINARY(name, type, function) BINARY_AS(aclnn##name, aclnnInplace##name, type, function(a, b))

// `a + alpha * b` and its like.
#define SCALED(name, type, function)                                                         \
    OPERATOR(aclnn##name, (In a_, type b_, Num alpha_, Out out_), (a_, b_, alpha_, out_),    \
             [](const Tensor& a, const auto& b, const auto& alpha, const Tensor& out) {      \
                 out.copy_(function(a, value_of(b), *alpha));                                \
             })                                                                              \
    OPERATOR(aclnnInplace##name, (Out a_, type b_, Num alpha_), (a_, b_, alpha_),            \
             [](const Tensor& a, const auto& b, const auto& alpha) {                         \
                 a.copy_(function(a, value_of(b), *alpha));                                  \
             })

namespace {

const Tensor& value_of(const Tensor& tensor) { return tensor; }
const Scalar& value_of(const c10::optional<Scalar>& scalar) { return *scalar; }

Tensor power(const Tensor& a, const Tensor& b) { return at::pow(a, b); }
Tensor power(const Tensor& a, const Scalar& b) { return at::pow(a, b); }

// The modes of division: exact, towards zero, downwards.
template <class Other>
Tensor divide(const Tensor& a, const Other& b, int mode) {
    if (mode == 1) return at::div(a, b, "trunc");
    if (mode == 2) return at::div(a, b, "floor");
    return at::div(a, b);
}

Tensor bounded(const Tensor& a, const c10::optional<Scalar>& low,
               const c10::optional<Scalar>& high) {
    return at::clamp(a, low, high);
}

}  // namespace

UNARY(Abs, at::abs)
UNARY(Acos, at::acos)
UNARY(Asin, at::asin)
UNARY(Atan, at::atan)
UNARY(BitwiseNot, at::bitwise_not)
UNARY(Ceil, at::ceil)
UNARY(Cos, at::cos)
UNARY(Cosh, at::cosh)
UNARY(Erf, at::erf)
UNARY(Erfc, at::erfc)
UNARY(Exp, at::exp)
UNARY(Exp2, at::exp2)
UNARY(Expm1, at::expm1)
UNARY(Floor, at::floor)
UNARY(Frac, at::frac)
UNARY_AS(Gelu, at::gelu(a))
UNARY(Hardsigmoid, at::hardsigmoid)
UNARY(Hardswish, at::hardswish)
UNARY(IsFinite, at::isfinite)
UNARY(IsNegInf, at::isneginf)
UNARY(IsPosInf, at::isposinf)
UNARY(Log, at::log)
UNARY(Log10, at::log10)
UNARY(Log1p, at::log1p)
UNARY(Log2, at::log2)
UNARY(LogicalNot, at::logical_not)
UNARY(Mish, at::mish)
UNARY(Neg, at::neg)
UNARY(Reciprocal, at::reciprocal)
UNARY(Relu, at::relu)
UNARY(Round, at::round)
UNARY(Rsqrt, at::rsqrt)
UNARY(Sigmoid, at::sigmoid)
UNARY(Sign, at::sign)
UNARY(Signbit, at::signbit)
UNARY(Silu, at::silu)
UNARY(Sin, at::sin)
UNARY(Sinh, at::sinh)
UNARY(Sqrt, at::sqrt)
UNARY(Tan, at::tan)
UNARY(Tanh, at::tanh)
UNARY(Trunc, at::trunc)

SCALED(Add, In, at::add)
SCALED(Adds, Num, at::add)
SCALED(Sub, In, at::sub)
SCALED(Subs, Num, at::sub)
SCALED(Rsub, In, at::rsub)
SCALED(Rsubs, Num, at::rsub)

BINARY(Mul, In, at::mul)
BINARY(Muls, Num, at::mul)
BINARY(Div, In, at::div)
BINARY(Divs, Num, at::div)
BINARY(FloorDivide, In, at::floor_divide)
BINARY(FloorDivides, Num, at::floor_divide)
BINARY(FmodTensor, In, at::fmod)
BINARY(FmodScalar, Num, at::fmod)
BINARY(RemainderTensorTensor, In, at::remainder)
BINARY(RemainderTensorScalar, Num, at::remainder)
BINARY(PowTensorTensor, In, power)
BINARY(PowTensorScalar, Num, power)
BINARY(Maximum, In, at::maximum)
BINARY(Minimum, In, at::minimum)
BINARY(Atan2, In, at::atan2)
BINARY(EqTensor, In, at::eq)
BINARY(EqScalar, Num, at::eq)
BINARY(NeTensor, In, at::ne)
BINARY(NeScalar, Num, at::ne)
BINARY(GtTensor, In, at::gt)
BINARY(GtScalar, Num, at::gt)
BINARY(GeTensor, In, at::ge)
BINARY(GeScalar, Num, at::ge)
BINARY(LtTensor, In, at::lt)
BINARY(LtScalar, Num, at::lt)
BINARY(LeTensor, In, at::le)
BINARY(LeScalar, Num, at::le)
BINARY(LogicalAnd, In, at::logical_and)
BINARY(LogicalOr, In, at::logical_or)
BINARY(LogicalXor, In, at::logical_xor)
BINARY(BitwiseAndTensor, In, at::bitwise_and)
BINARY(BitwiseAndScalar, Num, at::bitwise_and)
BINARY(BitwiseOrTensor, In, at::bitwise_or)
BINARY(BitwiseOrScalar, Num, at::bitwise_or)
BINARY(BitwiseXorTensor, In, at::bitwise_xor)
BINARY(BitwiseXorScalar, Num, at::bitwise_xor)
BINARY(ClampMin, Num, at::clamp_min)
BINARY(ClampMax, Num, at::clamp_max)
BINARY(ClampMinTensor, In, at::clamp_min)
BINARY(ClampMaxTensor, In, at::clamp_max)
BINARY(LeakyRelu, Num, at::leaky_relu)

OPERATOR(aclnnPowScalarTensor, (Num a_, In b_, Out out_), (a_, b_, out_),
         [](const auto& a, const Tensor& b, const Tensor& out) { out.copy_(at::pow(*a, b)); })
OPERATOR(aclnnRemainderScalarTensor, (Num a_, In b_, Out out_), (a_, b_, out_),
         [](const auto& a, const Tensor& b, const Tensor& out) { out.copy_(at::remainder(*a, b)); })

OPERATOR(aclnnDivMod, (In a_, In b_, int mode_, Out out_), (a_, b_, mode_, out_),
         [](const Tensor& a, const Tensor& b, int mode, const Tensor& out) {
             out.copy_(divide(a, b, mode));
         })
OPERATOR(aclnnDivMods, (In a_, Num b_, int mode_, Out out_), (a_, b_, mode_, out_),
         [](const Tensor& a, const auto& b, int mode, const Tensor& out) {
             out.copy_(divide(a, *b, mode));
         })
OPERATOR(aclnnInplaceDivMod, (Out a_, In b_, int mode_), (a_, b_, mode_),
         [](const Tensor& a, const Tensor& b, int mode) { a.copy_(divide(a, b, mode)); })
OPERATOR(aclnnInplaceDivMods, (Out a_, Num b_, int mode_), (a_, b_, mode_),
         [](const Tensor& a, const auto& b, int mode) { a.copy_(divide(a, *b, mode)); })

OPERATOR(aclnnClamp, (In a_, Num low_, Num high_, Out out_), (a_, low_, high_, out_),
         [](const Tensor& a, const auto& low, const auto& high, const Tensor& out) {
             out.copy_(bounded(a, low, high));
         })
OPERATOR(aclnnClampTensor, (In a_, In low_, In high_, Out out_), (a_, low_, high_, out_),
         [](const Tensor& a, const Tensor& low, const Tensor& high, const Tensor& out) {
             out.copy_(at::clamp(a, low, high));
         })

OPERATOR(aclnnGeluV2, (In a_, int64_t tanh_, Out out_), (a_, tanh_, out_),
         [](const Tensor& a, int64_t tanh, const Tensor& out) {
             out.copy_(at::gelu(a, tanh ? "tanh" : "none"));
         })
OPERATOR(aclnnRoundDecimals, (In a_, int64_t decimals_, Out out_), (a_, decimals_, out_),
         [](const Tensor& a, int64_t decimals, const Tensor& out) {
             out.copy_(at::round(a, decimals));
         })
OPERATOR(aclnnNanToNum, (In a_, float nan_, float highest_, float lowest_, Out out_),
         (a_, nan_, highest_, lowest_, out_),
         [](const Tensor& a, float nan, float highest, float lowest, const Tensor& out) {
             out.copy_(at::nan_to_num(a, nan, highest, lowest));
         })
OPERATOR(aclnnGlu, (In a_, int64_t dim_, Out out_), (a_, dim_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& out) { out.copy_(at::glu(a, dim)); })
OPERATOR(aclnnSwiGlu, (In a_, int64_t dim_, Out out_), (a_, dim_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& out) {
             const auto halves = a.chunk(2, dim);
             out.copy_(at::silu(halves[0]) * halves[1]);
         })

OPERATOR(aclnnAddcmul, (In a_, In x_, In y_, Num value_, Out out_), (a_, x_, y_, value_, out_),
         [](const Tensor& a, const Tensor& x, const Tensor& y, const auto& value,
            const Tensor& out) { out.copy_(at::addcmul(a, x, y, *value)); })
OPERATOR(aclnnAddcdiv, (In a_, In x_, In y_, Num value_, Out out_), (a_, x_, y_, value_, out_),
         [](const Tensor& a, const Tensor& x, const Tensor& y, const auto& value,
            const Tensor& out) { out.copy_(at::addcdiv(a, x, y, *value)); })
OPERATOR(aclnnInplaceAddcmul, (Out a_, In x_, In y_, Num value_), (a_, x_, y_, value_),
         [](const Tensor& a, const Tensor& x, const Tensor& y, const auto& value) {
             a.copy_(at::addcmul(a, x, y, *value));
         })
OPERATOR(aclnnInplaceAddcdiv, (Out a_, In x_, In y_, Num value_), (a_, x_, y_, value_),
         [](const Tensor& a, const Tensor& x, const Tensor& y, const auto& value) {
             a.copy_(at::addcdiv(a, x, y, *value));
         })
OPERATOR(aclnnLerp, (In a_, In end_, In weight_, Out out_), (a_, end_, weight_, out_),
         [](const Tensor& a, const Tensor& end, const Tensor& weight, const Tensor& out) {
             out.copy_(at::lerp(a, end, weight));
         })
OPERATOR(aclnnLerps, (In a_, In end_, Num weight_, Out out_), (a_, end_, weight_, out_),
         [](const Tensor& a, const Tensor& end, const auto& weight, const Tensor& out) {
             out.copy_(at::lerp(a, end, *weight));
         })

OPERATOR(aclnnSWhere, (In condition_, In a_, In b_, Out out_), (condition_, a_, b_, out_),
         [](const Tensor& condition, const Tensor& a, const Tensor& b, const Tensor& out) {
             out.copy_(at::where(condition, a, b));
         })
OPERATOR(aclnnEqual, (In a_, In b_, Out out_), (a_, b_, out_),
         [](const Tensor& a, const Tensor& b, const Tensor& out) { out.fill_(at::equal(a, b)); })
OPERATOR(aclnnIsClose,
         (In a_, In b_, double relative_, double absolute_, bool equal_nan_, Out out_),
         (a_, b_, relative_, absolute_, equal_nan_, out_),
         [](const Tensor& a, const Tensor& b, double relative, double absolute, bool equal_nan,
            const Tensor& out) { out.copy_(at::isclose(a, b, relative, absolute, equal_nan)); })
