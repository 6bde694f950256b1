// Copies, casts, fills, ranges, and random numbers.

#include <ATen/CPUGeneratorImpl.h>

#include "operators/operators.h"

using namespace sim;

namespace {

// The numbers depend on the seed and the offset alone, as on the device.
at::Generator generator(uint64_t seed, uint64_t offset) {
    uint64_t mixed = seed + 0x9E3779B97F4A7C15ull * (offset + 1);
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return at::make_generator<at::CPUGeneratorImpl>(mixed ^ (mixed >> 31));
}

// In a graph, seed and offset are in device memory, where every replay finds new ones.
at::Generator generator(const Tensor& seed, const Tensor& offset, int64_t further) {
    return generator(seed.item<int64_t>(), offset.item<int64_t>() + further);
}

void normal(Tensor out, double mean, double deviation, at::Generator from) {
    out.copy_(at::normal(mean, deviation, out.sizes(), from, out.options()));
}

void uniform(Tensor out, double low, double high, at::Generator from) {
    out.copy_(at::empty(out.sizes(), out.options()).uniform_(low, high, from));
}

void integers(Tensor out, int64_t low, int64_t high, at::Generator from) {
    out.copy_(at::randint(low, high, out.sizes(), from, at::TensorOptions().dtype(at::kLong)));
}

// One bit an element, one where it is kept.
void keep_mask(const Ints& shape, double drop, Tensor out, at::Generator from) {
    const int64_t count = c10::multiply_integers(shape);
    const Tensor kept = at::empty({count}).uniform_(0, 1, from) >= drop;
    out.zero_();
    auto* bytes = static_cast<uint8_t*>(out.data_ptr());
    const bool* bits = kept.const_data_ptr<bool>();
    for (int64_t i = 0; i < count; i++) bytes[i / 8] |= static_cast<uint8_t>(bits[i] << (i % 8));
}

Tensor apply_mask(const Tensor& a, const Tensor& mask, double drop) {
    Tensor kept = at::empty({a.numel()}, at::kBool);
    const auto* bytes = static_cast<const uint8_t*>(mask.data_ptr());
    bool* bits = kept.data_ptr<bool>();
    for (int64_t i = 0; i < a.numel(); i++) bits[i] = bytes[i / 8] >> (i % 8) & 1;
    return drop >= 1 ? at::zeros_like(a) : a * kept.view(a.sizes()) / (1 - drop);
}

}  // namespace

OPERATOR(aclnnInplaceCopy, (Out to_, In from_), (to_, from_),
         [](const Tensor& to, const Tensor& from) { to.copy_(from); })
OPERATOR(aclnnForeachCopy, (List from_, List to_), (from_, to_),
         [](const Tensors& from, const Tensors& to) {
             for (size_t i = 0; i < from.size(); i++) to[i].copy_(from[i]);
         })
OPERATOR(aclnnForeachZeroInplace, (List tensors_), (tensors_), [](const Tensors& tensors) {
    for (Tensor tensor : tensors) tensor.zero_();
})
OPERATOR(aclnnCast, (In a_, int, Out out_), (a_, out_),
         [](const Tensor& a, const Tensor& out) { out.copy_(a); })
OPERATOR(aclnnInplaceFillScalar, (Out a_, Num value_), (a_, value_),
         [](Tensor a, const auto& value) { a.fill_(*value); })
OPERATOR(aclnnInplaceFillTensor, (Out a_, In value_), (a_, value_),
         [](Tensor a, const Tensor& value) { a.fill_(value.reshape({})); })
OPERATOR(aclnnInplaceZero, (Out a_), (a_), [](Tensor a) { a.zero_(); })
OPERATOR(aclnnInplaceOne, (Out a_), (a_), [](Tensor a) { a.fill_(1); })

OPERATOR(aclnnArange, (Num start_, Num end_, Num step_, Out out_), (start_, end_, step_, out_),
         [](const auto& start, const auto& end, const auto& step, const Tensor& out) {
             out.copy_(at::arange(*start, *end, *step, out.options()));
         })
OPERATOR(aclnnRange, (Num start_, Num end_, Num step_, Out out_), (start_, end_, step_, out_),
         [](const auto& start, const auto& end, const auto& step, const Tensor& out) {
             out.copy_(at::range(*start, *end, *step, out.options()));
         })
OPERATOR(aclnnLinspace, (Num start_, Num end_, int64_t steps_, Out out_),
         (start_, end_, steps_, out_),
         [](const auto& start, const auto& end, int64_t steps, const Tensor& out) {
             out.copy_(at::linspace(*start, *end, steps, out.options()));
         })
OPERATOR(aclnnEye, (int64_t rows_, int64_t columns_, Out out_), (rows_, columns_, out_),
         [](int64_t rows, int64_t columns, const Tensor& out) {
             out.copy_(at::eye(rows, columns, out.options()));
         })

OPERATOR(aclnnInplaceNormal, (Out a_, float mean_, float std_, int64_t seed_, int64_t offset_),
         (a_, mean_, std_, seed_, offset_),
         [](Tensor a, float mean, float std, int64_t seed, int64_t offset) {
             normal(a, mean, std, generator(seed, offset));
         })
OPERATOR(aclnnInplaceNormalTensor,
         (Out a_, float mean_, float std_, In seed_, In offset_, int64_t further_),
         (a_, mean_, std_, seed_, offset_, further_),
         [](Tensor a, float mean, float std, const Tensor& seed, const Tensor& offset,
            int64_t further) { normal(a, mean, std, generator(seed, offset, further)); })
OPERATOR(aclnnInplaceUniform,
         (Out a_, double low_, double high_, uint64_t seed_, uint64_t offset_),
         (a_, low_, high_, seed_, offset_),
         [](Tensor a, double low, double high, uint64_t seed, uint64_t offset) {
             uniform(a, low, high, generator(seed, offset));
         })
OPERATOR(aclnnInplaceUniformTensor,
         (Out a_, double low_, double high_, In seed_, In offset_, uint64_t further_),
         (a_, low_, high_, seed_, offset_, further_),
         [](Tensor a, double low, double high, const Tensor& seed, const Tensor& offset,
            uint64_t further) {
             uniform(a, low, high, generator(seed, offset, static_cast<int64_t>(further)));
         })
OPERATOR(aclnnInplaceRandom,
         (Out a_, int64_t low_, int64_t high_, int64_t seed_, int64_t offset_),
         (a_, low_, high_, seed_, offset_),
         [](Tensor a, int64_t low, int64_t high, int64_t seed, int64_t offset) {
             integers(a, low, high, generator(seed, offset));
         })
OPERATOR(aclnnInplaceRandomTensor,
         (Out a_, int64_t low_, int64_t high_, In seed_, In offset_, int64_t further_),
         (a_, low_, high_, seed_, offset_, further_),
         [](Tensor a, int64_t low, int64_t high, const Tensor& seed, const Tensor& offset,
            int64_t further) { integers(a, low, high, generator(seed, offset, further)); })
OPERATOR(aclnnInplaceBernoulli, (Out a_, Num chance_, int64_t seed_, int64_t offset_),
         (a_, chance_, seed_, offset_),
         [](Tensor a, const auto& chance, int64_t seed, int64_t offset) {
             a.bernoulli_(chance->toDouble(), generator(seed, offset));
         })
OPERATOR(aclnnInplaceBernoulliTensor, (Out a_, In chances_, int64_t seed_, int64_t offset_),
         (a_, chances_, seed_, offset_),
         [](Tensor a, const Tensor& chances, int64_t seed, int64_t offset) {
             a.bernoulli_(chances, generator(seed, offset));
         })
OPERATOR(aclnnRandperm, (int64_t count_, int64_t seed_, int64_t offset_, Out out_),
         (count_, seed_, offset_, out_),
         [](int64_t count, int64_t seed, int64_t offset, const Tensor& out) {
             out.copy_(at::randperm(count, generator(seed, offset)));
         })
OPERATOR(aclnnMultinomial,
         (In a_, int64_t count_, bool replace_, int64_t seed_, int64_t offset_, Out out_),
         (a_, count_, replace_, seed_, offset_, out_),
         [](const Tensor& a, int64_t count, bool replace, int64_t seed, int64_t offset,
            const Tensor& out) {
             out.copy_(at::multinomial(a, count, replace, generator(seed, offset)));
         })
OPERATOR(aclnnMultinomialTensor,
         (In a_, int64_t count_, bool replace_, In seed_, In offset_, int64_t further_, Out out_),
         (a_, count_, replace_, seed_, offset_, further_, out_),
         [](const Tensor& a, int64_t count, bool replace, const Tensor& seed, const Tensor& offset,
            int64_t further, const Tensor& out) {
             out.copy_(at::multinomial(a, count, replace, generator(seed, offset, further)));
         })
OPERATOR(aclnnDropoutGenMaskV2,
         (Array shape_, double drop_, int64_t seed_, int64_t offset_, int, Out out_),
         (shape_, drop_, seed_, offset_, out_),
         [](const Ints& shape, double drop, int64_t seed, int64_t offset, const Tensor& out) {
             keep_mask(shape, drop, out, generator(seed, offset));
         })
OPERATOR(aclnnDropoutGenMaskV2Tensor,
         (Array shape_, double drop_, In seed_, In offset_, int64_t further_, int, Out out_),
         (shape_, drop_, seed_, offset_, further_, out_),
         [](const Ints& shape, double drop, const Tensor& seed, const Tensor& offset,
            int64_t further, const Tensor& out) {
             keep_mask(shape, drop, out, generator(seed, offset, further));
         })
OPERATOR(aclnnDropoutDoMask, (In a_, In mask_, double drop_, Out out_), (a_, mask_, drop_, out_),
         [](const Tensor& a, const Tensor& mask, double drop, const Tensor& out) {
             out.copy_(apply_mask(a, mask, drop));
         })
