// Products of matrices, normalisation, and rotary embeddings.

#include "operators/operators.h"

using namespace sim;

namespace {

// The real device accumulates in float32; so does this, where the CPU's own kernels might not.
Tensor rms_norm(const Tensor& x, const Tensor& gamma, double eps, const Tensor& rstd) {
    const Tensor wide = x.to(at::kFloat);
    Ints dims;
    for (int64_t dim = x.dim() - gamma.dim(); dim < x.dim(); dim++) dims.push_back(dim);
    const Tensor scale = at::rsqrt(at::mean(wide * wide, dims, true) + eps);
    if (rstd.defined() && rstd.numel() == scale.numel()) rstd.copy_(scale.view(rstd.sizes()));
    return wide * scale * gamma.to(at::kFloat);
}

Tensor rotated(const Tensor& x, int64_t interleaved) {
    if (interleaved) {
        const Tensor pairs = x.unflatten(-1, {-1, 2});
        return at::stack({-pairs.select(-1, 1), pairs.select(-1, 0)}, -1).flatten(-2);
    }
    const auto halves = x.chunk(2, -1);
    return at::cat({-halves[1], halves[0]}, -1);
}

}  // namespace

#define PRODUCT(name)                                                                     \
    OPERATOR(name, (In a_, In b_, Out out_, int8_t), (a_, b_, out_),                      \
             [](const Tensor& a, const Tensor& b, const Tensor& out) {                    \
                 out.copy_(at::matmul(a, b));                                             \
             })
PRODUCT(aclnnMm)
PRODUCT(aclnnMatmul)
PRODUCT(aclnnBatchMatMul)
PRODUCT(aclnnMv)

OPERATOR(aclnnDot, (In a_, In b_, Out out_), (a_, b_, out_),
         [](const Tensor& a, const Tensor& b, const Tensor& out) { out.copy_(at::dot(a, b)); })

#define SUM_OF_PRODUCT(name, function)                                                        \
    OPERATOR(name, (In sum_, In a_, In b_, Num beta_, Num alpha_, Out out_, int8_t),          \
             (sum_, a_, b_, beta_, alpha_, out_),                                             \
             [](const Tensor& sum, const Tensor& a, const Tensor& b, const auto& beta,        \
                const auto& alpha, const Tensor& out) {                                       \
                 out.copy_(function(sum, a, b, *beta, *alpha));                               \
             })
SUM_OF_PRODUCT(aclnnAddmm, at::addmm)
SUM_OF_PRODUCT(aclnnBaddbmm, at::baddbmm)

OPERATOR(aclnnInplaceAddmm, (Out sum_, In a_, In b_, Num beta_, Num alpha_, int8_t),
         (sum_, a_, b_, beta_, alpha_),
         [](const Tensor& sum, const Tensor& a, const Tensor& b, const auto& beta,
            const auto& alpha) { sum.copy_(at::addmm(sum, a, b, *beta, *alpha)); })
OPERATOR(aclnnAddmv, (In sum_, In a_, In b_, Num alpha_, Num beta_, Out out_, int8_t),
         (sum_, a_, b_, alpha_, beta_, out_),
         [](const Tensor& sum, const Tensor& a, const Tensor& b, const auto& alpha,
            const auto& beta, const Tensor& out) {
             out.copy_(at::addmv(sum, a, b, *beta, *alpha));
         })

OPERATOR(aclnnRmsNorm, (In x_, In gamma_, double eps_, Out y_, Out rstd_),
         (x_, gamma_, eps_, y_, rstd_),
         [](const Tensor& x, const Tensor& gamma, double eps, const Tensor& y,
            const Tensor& rstd) { y.copy_(rms_norm(x, gamma, eps, rstd)); })
OPERATOR(aclnnAddRmsNorm, (In x_, In add_, In gamma_, double eps_, Out y_, Out rstd_, Out sum_),
         (x_, add_, gamma_, eps_, y_, rstd_, sum_),
         [](const Tensor& x, const Tensor& add, const Tensor& gamma, double eps, const Tensor& y,
            const Tensor& rstd, const Tensor& sum) {
             sum.copy_(x + add);
             y.copy_(rms_norm(sum, gamma, eps, rstd));
         })
OPERATOR(aclnnLayerNorm,
         (In x_, Array shape_, In weight_, In bias_, double eps_, Out y_, Out mean_, Out rstd_),
         (x_, shape_, weight_, bias_, eps_, y_, mean_, rstd_),
         [](const Tensor& x, const Ints& shape, const Tensor& weight, const Tensor& bias,
            double eps, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
             const auto found = at::native_layer_norm(x, shape, weight, bias, eps);
             y.copy_(std::get<0>(found));
             if (mean.defined()) mean.copy_(std::get<1>(found).view(mean.sizes()));
             if (rstd.defined()) rstd.copy_(std::get<2>(found).view(rstd.sizes()));
         })

OPERATOR(aclnnRotaryPositionEmbedding,
         (In x_, In cos_, In sin_, int64_t interleaved_, Out y_), (x_, cos_, sin_, interleaved_, y_),
         [](const Tensor& x, const Tensor& cos, const Tensor& sin, int64_t interleaved,
            const Tensor& y) { y.copy_(x * cos + rotated(x, interleaved) * sin); })
