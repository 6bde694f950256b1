// Reductions, scans, softmax, sorting and searching.

#include "operators/operators.h"

using namespace sim;

namespace {

at::OptionalIntArrayRef some(const Ints& dims) {
    return dims.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(dims);
}

// `out` may have kept dimensions of one that the function left out, and the other way round.
void put(const Tensor& out, const Tensor& value) { out.copy_(value.reshape(out.sizes())); }

Tensor all_of(Tensor a, Ints dims, bool keep, bool any) {
    if (dims.empty()) {
        for (int64_t dim = 0; dim < a.dim(); dim++) dims.push_back(dim);
    }
    for (int64_t dim : dims) a = any ? at::any(a, dim, true) : at::all(a, dim, true);
    return a;
}

}  // namespace

#define TYPED_REDUCTION(name, function)                                                    \
    OPERATOR(name, (In a_, Array dims_, bool keep_, int, Out out_), (a_, dims_, keep_, out_), \
             [](const Tensor& a, const Ints& dims, bool keep, const Tensor& out) {         \
                 put(out, function(a, some(dims), keep, out.scalar_type()));               \
             })
TYPED_REDUCTION(aclnnMean, at::mean)
TYPED_REDUCTION(aclnnReduceSum, at::sum)
TYPED_REDUCTION(aclnnReduceNansum, at::nansum)

#define REDUCTION(name, function)                                                        \
    OPERATOR(name, (In a_, Array dims_, bool keep_, Out out_), (a_, dims_, keep_, out_), \
             [](const Tensor& a, const Ints& dims, bool keep, const Tensor& out) {       \
                 put(out, function);                                                     \
             })
REDUCTION(aclnnAmax, at::amax(a, dims, keep))
REDUCTION(aclnnAmin, at::amin(a, dims, keep))
REDUCTION(aclnnAll, all_of(a, dims, keep, false))
REDUCTION(aclnnAny, all_of(a, dims, keep, true))
REDUCTION(aclnnLogSumExp, at::logsumexp(a, dims, keep))

#define WHOLE_REDUCTION(name, function)            \
    OPERATOR(name, (In a_, Out out_), (a_, out_), \
             [](const Tensor& a, const Tensor& out) { put(out, function(a)); })
WHOLE_REDUCTION(aclnnMax, at::max)
WHOLE_REDUCTION(aclnnMin, at::min)

#define EXTREME(name, function)                                                            \
    OPERATOR(name, (In a_, int64_t dim_, bool keep_, Out values_, Out where_),             \
             (a_, dim_, keep_, values_, where_),                                           \
             [](const Tensor& a, int64_t dim, bool keep, const Tensor& values,             \
                const Tensor& where) {                                                     \
                 const auto found = function(a, dim, keep);                                \
                 values.copy_(std::get<0>(found));                                         \
                 where.copy_(std::get<1>(found));                                          \
             })
EXTREME(aclnnMaxDim, at::max)
EXTREME(aclnnMinDim, at::min)

#define WHERE_EXTREME(name, function)                                                   \
    OPERATOR(name, (In a_, int64_t dim_, bool keep_, Out out_), (a_, dim_, keep_, out_), \
             [](const Tensor& a, int64_t dim, bool keep, const Tensor& out) {           \
                 put(out, function(a, dim, keep));                                      \
             })
WHERE_EXTREME(aclnnArgMax, at::argmax)
WHERE_EXTREME(aclnnArgMin, at::argmin)

OPERATOR(aclnnProd, (In a_, int, Out out_), (a_, out_),
         [](const Tensor& a, const Tensor& out) { put(out, at::prod(a, out.scalar_type())); })
OPERATOR(aclnnProdDim, (In a_, int64_t dim_, bool keep_, int, Out out_), (a_, dim_, keep_, out_),
         [](const Tensor& a, int64_t dim, bool keep, const Tensor& out) {
             put(out, at::prod(a, dim, keep, out.scalar_type()));
         })
OPERATOR(aclnnCumsum, (In a_, int64_t dim_, int, Out out_), (a_, dim_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& out) {
             out.copy_(at::cumsum(a, dim, out.scalar_type()));
         })
OPERATOR(aclnnVarCorrection, (In a_, Array dims_, int64_t correction_, bool keep_, Out out_),
         (a_, dims_, correction_, keep_, out_),
         [](const Tensor& a, const Ints& dims, int64_t correction, bool keep, const Tensor& out) {
             put(out, at::var(a, some(dims), Scalar(correction), keep));
         })
OPERATOR(aclnnStd, (In a_, Array dims_, int64_t correction_, bool keep_, Out out_),
         (a_, dims_, correction_, keep_, out_),
         [](const Tensor& a, const Ints& dims, int64_t correction, bool keep, const Tensor& out) {
             put(out, at::std(a, some(dims), Scalar(correction), keep));
         })
OPERATOR(aclnnNorm, (In a_, Num order_, Array dims_, bool keep_, Out out_),
         (a_, order_, dims_, keep_, out_),
         [](const Tensor& a, const auto& order, const Ints& dims, bool keep, const Tensor& out) {
             put(out, at::linalg_vector_norm(a, order.value_or(2), some(dims), keep));
         })
OPERATOR(aclnnLinalgVectorNorm, (In a_, Num order_, Array dims_, bool keep_, int, Out out_),
         (a_, order_, dims_, keep_, out_),
         [](const Tensor& a, const auto& order, const Ints& dims, bool keep, const Tensor& out) {
             put(out, at::linalg_vector_norm(a, order.value_or(2), some(dims), keep));
         })

OPERATOR(aclnnSoftmax, (In a_, int64_t dim_, Out out_), (a_, dim_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& out) { out.copy_(at::softmax(a, dim)); })
OPERATOR(aclnnLogSoftmax, (In a_, int64_t dim_, Out out_), (a_, dim_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& out) {
             out.copy_(at::log_softmax(a, dim));
         })

OPERATOR(aclnnSort, (In a_, bool stable_, int64_t dim_, bool descending_, Out values_, Out where_),
         (a_, stable_, dim_, descending_, values_, where_),
         [](const Tensor& a, bool stable, int64_t dim, bool descending, const Tensor& values,
            const Tensor& where) {
             const auto found = at::sort(a, stable, dim, descending);
             values.copy_(std::get<0>(found));
             where.copy_(std::get<1>(found));
         })
#define TOPK(name, ...)                                                                        \
    OPERATOR(name,                                                                             \
             (In a_, int64_t k_, int64_t dim_, bool largest_, bool sorted_, __VA_ARGS__        \
              Out values_, Out where_),                                                        \
             (a_, k_, dim_, largest_, sorted_, values_, where_),                               \
             [](const Tensor& a, int64_t k, int64_t dim, bool largest, bool sorted,            \
                const Tensor& values, const Tensor& where) {                                   \
                 const auto found = at::topk(a, k, dim, largest, sorted);                      \
                 values.copy_(std::get<0>(found));                                             \
                 where.copy_(std::get<1>(found));                                              \
             })
#define SORT_POLICY int64_t,
TOPK(aclnnTopk, )
TOPK(aclnnTopkV2, SORT_POLICY)

OPERATOR(aclnnSearchSorted, (In sorted_, In a_, bool narrow_, bool right_, In sorter_, Out out_),
         (sorted_, a_, narrow_, right_, sorter_, out_),
         [](const Tensor& sorted, const Tensor& a, bool narrow, bool right, const Tensor& sorter,
            const Tensor& out) {
             out.copy_(sorter.defined()
                           ? at::searchsorted(sorted, a, narrow, right, c10::nullopt, sorter)
                           : at::searchsorted(sorted, a, narrow, right));
         })
OPERATOR(aclnnSearchSorteds, (In sorted_, Num a_, bool narrow_, bool right_, In, Out out_),
         (sorted_, a_, narrow_, right_, out_),
         [](const Tensor& sorted, const auto& a, bool narrow, bool right, const Tensor& out) {
             put(out, at::searchsorted(sorted, *a, narrow, right));
         })
OPERATOR(aclnnBucketize, (In a_, In bounds_, bool narrow_, bool right_, Out out_),
         (a_, bounds_, narrow_, right_, out_),
         [](const Tensor& a, const Tensor& bounds, bool narrow, bool right, const Tensor& out) {
             out.copy_(at::bucketize(a, bounds, narrow, right));
         })
