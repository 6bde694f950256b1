// Gathering, scattering, masks, and putting tensors together.

#include "operators/operators.h"

using namespace sim;

namespace {

using Optionals = c10::List<c10::optional<Tensor>>;

Optionals optionals(const Tensors& tensors) {
    Optionals list;
    for (const Tensor& tensor : tensors) {
        // An index that was left out comes as an undefined or an empty tensor.
        const bool present = tensor.defined() && (tensor.numel() > 0 || tensors.size() == 1);
        list.push_back(present ? c10::optional<Tensor>(tensor) : c10::nullopt);
    }
    return list;
}

Tensor scattered(const Tensor& a, int64_t dim, const Tensor& index, const Tensor& source,
                 int64_t reduction) {
    if (reduction == 1) return at::scatter(a, dim, index, source, "add");
    if (reduction == 2) return at::scatter(a, dim, index, source, "multiply");
    return at::scatter(a, dim, index, source);
}

Tensor scattered(const Tensor& a, int64_t dim, const Tensor& index, const Scalar& value,
                 int64_t reduction) {
    if (reduction == 1) return at::scatter(a, dim, index, value, "add");
    if (reduction == 2) return at::scatter(a, dim, index, value, "multiply");
    return at::scatter(a, dim, index, value);
}

}  // namespace

OPERATOR(aclnnIndexSelect, (In a_, int64_t dim_, In index_, Out out_), (a_, dim_, index_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& index, const Tensor& out) {
             out.copy_(at::index_select(a, dim, index));
         })
OPERATOR(aclnnGather, (In a_, int64_t dim_, In index_, Out out_), (a_, dim_, index_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& index, const Tensor& out) {
             out.copy_(at::gather(a, dim, index.to(at::kLong)));
         })
OPERATOR(aclnnEmbedding, (In weight_, In index_, Out out_), (weight_, index_, out_),
         [](const Tensor& weight, const Tensor& index, const Tensor& out) {
             out.copy_(at::index_select(weight, 0, index.flatten()).view(out.sizes()));
         })
OPERATOR(aclnnTake, (In a_, In index_, Out out_), (a_, index_, out_),
         [](const Tensor& a, const Tensor& index, const Tensor& out) {
             out.copy_(at::take(a, index.to(at::kLong)));
         })
OPERATOR(aclnnIndex, (In a_, List indices_, Out out_), (a_, indices_, out_),
         [](const Tensor& a, const Tensors& indices, const Tensor& out) {
             out.copy_(at::index(a, optionals(indices)));
         })
OPERATOR(aclnnIndexPutImpl, (Out a_, List indices_, In values_, bool accumulate_, bool),
         (a_, indices_, values_, accumulate_),
         [](Tensor a, const Tensors& indices, const Tensor& values, bool accumulate) {
             at::index_put_(a, optionals(indices), values, accumulate);
         })
OPERATOR(aclnnIndexCopy, (In a_, int64_t dim_, In index_, In source_, Out out_),
         (a_, dim_, index_, source_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& index, const Tensor& source,
            const Tensor& out) {
             out.copy_(at::index_copy(a, dim, index.to(at::kLong), source));
         })
OPERATOR(aclnnInplaceIndexCopy, (Out a_, int64_t dim_, In index_, In source_),
         (a_, dim_, index_, source_),
         [](Tensor a, int64_t dim, const Tensor& index, const Tensor& source) {
             a.index_copy_(dim, index.to(at::kLong), source);
         })
OPERATOR(aclnnIndexAdd, (In a_, int64_t dim_, In index_, In source_, Num alpha_, Out out_),
         (a_, dim_, index_, source_, alpha_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& index, const Tensor& source,
            const auto& alpha, const Tensor& out) {
             out.copy_(at::index_add(a, dim, index, source, *alpha));
         })

#define SCATTER(name, type, source_of)                                                          \
    OPERATOR(aclnn##name, (In a_, int64_t dim_, In index_, type source_, int64_t how_, Out out_), \
             (a_, dim_, index_, source_, how_, out_),                                           \
             [](const Tensor& a, int64_t dim, const Tensor& index, const auto& source,          \
                int64_t how, const Tensor& out) {                                               \
                 out.copy_(scattered(a, dim, index.to(at::kLong), source_of source, how));      \
             })                                                                                 \
    OPERATOR(aclnnInplace##name, (Out a_, int64_t dim_, In index_, type source_, int64_t how_), \
             (a_, dim_, index_, source_, how_),                                                 \
             [](const Tensor& a, int64_t dim, const Tensor& index, const auto& source,          \
                int64_t how) {                                                                  \
                 a.copy_(scattered(a, dim, index.to(at::kLong), source_of source, how));        \
             })
SCATTER(Scatter, In, )
SCATTER(ScatterValue, Num, *)

OPERATOR(aclnnScatterAdd, (In a_, int64_t dim_, In index_, In source_, Out out_),
         (a_, dim_, index_, source_, out_),
         [](const Tensor& a, int64_t dim, const Tensor& index, const Tensor& source,
            const Tensor& out) {
             out.copy_(at::scatter_add(a, dim, index.to(at::kLong), source));
         })

OPERATOR(aclnnInplaceMaskedFillScalar, (Out a_, In mask_, Num value_), (a_, mask_, value_),
         [](Tensor a, const Tensor& mask, const auto& value) { a.masked_fill_(mask, *value); })
OPERATOR(aclnnInplaceMaskedFillTensor, (Out a_, In mask_, In value_), (a_, mask_, value_),
         [](Tensor a, const Tensor& mask, const Tensor& value) {
             a.masked_fill_(mask, value.reshape({}));
         })
OPERATOR(aclnnMaskedSelect, (In a_, In mask_, Out out_), (a_, mask_, out_, Resized{out_}),
         [](const Tensor& a, const Tensor& mask, const Tensor& out, Resized handle) {
             const Tensor found = at::masked_select(a, mask);
             out.slice(0, 0, found.size(0)).copy_(found);
             handle.tensor->sizes = {found.size(0)};
         })
OPERATOR(aclnnNonzero, (In a_, Out out_), (a_, out_, Resized{out_}),
         [](const Tensor& a, const Tensor& out, Resized handle) {
             const Tensor found = at::nonzero(a);
             out.slice(0, 0, found.size(0)).copy_(found);
             handle.tensor->sizes = found.sizes().vec();
         })
OPERATOR(aclnnNonzeroV2, (In a_, Out out_), (a_, out_, Resized{out_}),
         [](const Tensor& a, const Tensor& out, Resized handle) {
             const Tensor found = at::nonzero(a).t().contiguous();
             out.flatten().slice(0, 0, found.numel()).copy_(found.flatten());
             handle.tensor->sizes = found.sizes().vec();
         })

OPERATOR(aclnnCat, (List tensors_, int64_t dim_, Out out_), (tensors_, dim_, out_),
         [](const Tensors& tensors, int64_t dim, const Tensor& out) {
             out.copy_(at::cat(tensors, dim));
         })
OPERATOR(aclnnStack, (List tensors_, int64_t dim_, Out out_), (tensors_, dim_, out_),
         [](const Tensors& tensors, int64_t dim, const Tensor& out) {
             out.copy_(at::stack(tensors, dim));
         })
OPERATOR(aclnnRepeat, (In a_, Array repeats_, Out out_), (a_, repeats_, out_),
         [](const Tensor& a, const Ints& repeats, const Tensor& out) {
             out.copy_(a.repeat(repeats));
         })
OPERATOR(aclnnRepeatInterleaveIntWithDim,
         (In a_, int64_t repeats_, int64_t dim_, int64_t, Out out_), (a_, repeats_, dim_, out_),
         [](const Tensor& a, int64_t repeats, int64_t dim, const Tensor& out) {
             out.copy_(a.repeat_interleave(repeats, dim));
         })
OPERATOR(aclnnRepeatInterleaveInt, (In a_, int64_t repeats_, int64_t, Out out_),
         (a_, repeats_, out_), [](const Tensor& a, int64_t repeats, const Tensor& out) {
             out.copy_(a.repeat_interleave(repeats));
         })
OPERATOR(aclnnFlip, (In a_, Array dims_, Out out_), (a_, dims_, out_),
         [](const Tensor& a, const Ints& dims, const Tensor& out) { out.copy_(at::flip(a, dims)); })
OPERATOR(aclnnRoll, (In a_, Array shifts_, Array dims_, Out out_), (a_, shifts_, dims_, out_),
         [](const Tensor& a, const Ints& shifts, const Ints& dims, const Tensor& out) {
             out.copy_(at::roll(a, shifts, dims));
         })
OPERATOR(aclnnTril, (In a_, int64_t diagonal_, Out out_), (a_, diagonal_, out_),
         [](const Tensor& a, int64_t diagonal, const Tensor& out) {
             out.copy_(at::tril(a, diagonal));
         })
OPERATOR(aclnnTriu, (In a_, int64_t diagonal_, Out out_), (a_, diagonal_, out_),
         [](const Tensor& a, int64_t diagonal, const Tensor& out) {
             out.copy_(at::triu(a, diagonal));
         })
OPERATOR(aclnnConstantPadNd, (In a_, Array pad_, Num value_, Out out_), (a_, pad_, value_, out_),
         [](const Tensor& a, const Ints& pad, const auto& value, const Tensor& out) {
             out.copy_(at::constant_pad_nd(a, pad, *value));
         })

OPERATOR(aclnnOneHot, (In a_, int classes_, In on_, In off_, int64_t axis_, Out out_),
         (a_, classes_, on_, off_, axis_, out_),
         [](const Tensor& a, int classes, const Tensor& on, const Tensor& off, int64_t axis,
            const Tensor& out) {
             Tensor hot = a.unsqueeze(-1) == at::arange(classes);
             if (axis >= 0) hot = hot.movedim(-1, axis);
             out.copy_(at::where(hot, on.reshape({}), off.reshape({})));
         })

// torch_npu asks for the shape that such an operator found, after it has waited for the stream.
API int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dims) {
    *dims = tensor->sizes.size();
    *sizes = new int64_t[tensor->sizes.size()];
    std::copy(tensor->sizes.begin(), tensor->sizes.end(), *sizes);
    return 0;
}
