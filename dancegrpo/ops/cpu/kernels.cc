// Fused float32 kernels of the transformer blocks, for MindSpore's CPU backend (`ops.Custom`, func_type "aot").
//
// MindSpore's CPU backend runs every elementwise operator and every reduction as a pass of its own over memory,
// with some 50 microseconds of overhead each; a block of a small model has some 150 of them, and its products
// take a quarter of the time. Each kernel here does in one pass what lies between two products.
//
// All tensors are contiguous float32. A backward kernel computes what it needs of the forward pass anew from its
// inputs. Sums over samples are taken in a fixed number of parts and in a fixed order, so results do not depend on
// the number of threads; a sample's result does not depend on its place in the batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kParts = 16;
constexpr float kGeluSlope = 1.5957691216057308f;  // 2 sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

struct Args {
  void **params;
  int64_t **shapes;
  float *at(int i) const { return static_cast<float *>(params[i]); }
  int64_t dim(int i, int axis) const { return shapes[i][axis]; }
};

// exp in float32 to about 2 ulp, in a form that compilers vectorise: 2^n * e^r, |r| <= ln(2) / 2. NaN stays NaN.
inline float Exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float shifted = x * 1.44269504f + magic;
  const float n = shifted - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits + 127) << 23;  // the low bits of `shifted` hold n
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

inline int64_t PartStart(int64_t count, int part) { return count * part / kParts; }

// out[i] = sum over parts of partial[part][i].
void SumParts(const std::vector<float> &partial, int64_t size, float *out) {
  for (int64_t i = 0; i < size; ++i) out[i] = partial[i];
  for (int part = 1; part < kParts; ++part) {
    const float *row = partial.data() + part * size;
    for (int64_t i = 0; i < size; ++i) out[i] += row[i];
  }
}

inline float Sum(const float *x, int64_t n) {
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += x[i];
  return total;
}

inline float Dot(const float *x, const float *y, int64_t n) {
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; ++i) total += x[i] * y[i];
  return total;
}

// ---- x normalised over the last axis, times (1 + scale), plus shift

struct Moments {
  float mean, rstd;
};

inline Moments RowMoments(const float *x, int64_t n, float eps) {
  const float mean = Sum(x, n) / n;
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  return {mean, 1.0f / std::sqrt(squares / n + eps)};
}

void ModulatedLayerNorm(const float *x, const float *scale, const float *shift, float eps, int64_t batch, int64_t rows,
                        int64_t size, float *out) {
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < batch; ++b) {
    const float *a = scale + b * size, *c = shift + b * size;
    for (int64_t s = 0; s < rows; ++s) {
      const float *row = x + (b * rows + s) * size;
      float *y = out + (b * rows + s) * size;
      const Moments m = RowMoments(row, size, eps);
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) y[i] = (row[i] - m.mean) * m.rstd * (1.0f + a[i]) + c[i];
    }
  }
}

void ModulatedLayerNormGrad(const float *x, const float *scale, float eps, const float *dout, int64_t batch,
                            int64_t rows, int64_t size, float *dx, float *dscale, float *dshift) {
#pragma omp parallel
  {
    std::vector<float> buffer(2 * size);
    float *normal = buffer.data(), *g = normal + size;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < batch; ++b) {
      const float *a = scale + b * size;
      float *da = dscale + b * size, *dc = dshift + b * size;
      std::fill(da, da + size, 0.0f);
      std::fill(dc, dc + size, 0.0f);
      for (int64_t s = 0; s < rows; ++s) {
        const int64_t at = (b * rows + s) * size;
        const float *row = x + at, *dy = dout + at;
        float *dr = dx + at;
        const Moments m = RowMoments(row, size, eps);
        float sum_g = 0.0f, sum_gn = 0.0f;
#pragma omp simd reduction(+ : sum_g, sum_gn)
        for (int64_t i = 0; i < size; ++i) {
          normal[i] = (row[i] - m.mean) * m.rstd;
          g[i] = dy[i] * (1.0f + a[i]);
          sum_g += g[i];
          sum_gn += g[i] * normal[i];
          da[i] += dy[i] * normal[i];
          dc[i] += dy[i];
        }
        const float mean_g = sum_g / size, mean_gn = sum_gn / size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) dr[i] = m.rstd * (g[i] - mean_g - normal[i] * mean_gn);
      }
    }
  }
}

// ---- x + gate * (y + bias)

void GatedResidual(const float *x, const float *gate, const float *y, const float *bias, int64_t batch, int64_t rows,
                   int64_t size, float *out) {
#pragma omp parallel for schedule(static)
  for (int64_t b = 0; b < batch; ++b) {
    const float *g = gate + b * size;
    for (int64_t s = 0; s < rows; ++s) {
      const int64_t at = (b * rows + s) * size;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) out[at + i] = x[at + i] + g[i] * (y[at + i] + bias[i]);
    }
  }
}

void GatedResidualGrad(const float *gate, const float *y, const float *bias, const float *dout, int64_t batch,
                       int64_t rows, int64_t size, float *dgate, float *dy, float *dbias) {
  std::vector<float> partial(kParts * size, 0.0f);
#pragma omp parallel for schedule(static)
  for (int part = 0; part < kParts; ++part) {
    float *db = partial.data() + part * size;
    for (int64_t b = PartStart(batch, part); b < PartStart(batch, part + 1); ++b) {
      const float *g = gate + b * size;
      float *dg = dgate + b * size;
      std::fill(dg, dg + size, 0.0f);
      for (int64_t s = 0; s < rows; ++s) {
        const int64_t at = (b * rows + s) * size;
#pragma omp simd
        for (int64_t i = 0; i < size; ++i) {
          const float d = dout[at + i], dv = d * g[i];
          dg[i] += d * (y[at + i] + bias[i]);
          dy[at + i] = dv;
          db[i] += dv;
        }
      }
    }
  }
  SumParts(partial, size, dbias);
}

// ---- tanh GELU of (x + bias)

void BiasGelu(const float *x, const float *bias, int64_t rows, int64_t size, float *out) {
#pragma omp parallel for schedule(static)
  for (int64_t s = 0; s < rows; ++s) {
    const float *row = x + s * size;
    float *y = out + s * size;
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) {
      const float v = row[i] + bias[i];
      y[i] = v / (1.0f + Exp(-kGeluSlope * (v + kGeluCubic * v * v * v)));
    }
  }
}

void BiasGeluGrad(const float *x, const float *bias, const float *dout, int64_t rows, int64_t size, float *dx,
                  float *dbias) {
  std::vector<float> partial(kParts * size, 0.0f);
#pragma omp parallel for schedule(static)
  for (int part = 0; part < kParts; ++part) {
    float *db = partial.data() + part * size;
    for (int64_t s = PartStart(rows, part); s < PartStart(rows, part + 1); ++s) {
      const int64_t at = s * size;
#pragma omp simd
      for (int64_t i = 0; i < size; ++i) {
        const float v = x[at + i] + bias[i];
        const float gate = 1.0f / (1.0f + Exp(-kGeluSlope * (v + kGeluCubic * v * v * v)));
        const float slope = kGeluSlope * (1.0f + 3.0f * kGeluCubic * v * v);
        const float d = dout[at + i] * (gate + v * gate * (1.0f - gate) * slope);
        dx[at + i] = d;
        db[i] += d;
      }
    }
  }
  SumParts(partial, size, dbias);
}

// ---- attention over one or two streams of tokens: bias, RMS norm and rotation of query and key, softmax, values

struct Stream {  // tensors (B, tokens, heads * D); biases (heads * D,); weights of the norms (D,)
  const float *query, *key, *value, *query_bias, *key_bias, *value_bias, *query_weight, *key_weight;
  int64_t tokens;
};

struct StreamGrad {
  float *query, *key, *value, *query_bias, *key_bias, *value_bias, *query_weight, *key_weight;
};

// Loops over the head dimension: with it known, compilers keep a row in registers.
template <int kDim>
class Head {
 public:
  Head(int64_t tokens, int64_t dim) : tokens_(tokens), dim_(kDim ? kDim : dim), padded_((tokens + 15) / 16 * 16) {
    const int64_t rows = tokens_ * this->dim();
    for (auto *buffer : {&query_, &key_, &value_, &query_normal_, &key_normal_, &dout_, &dquery_, &dkey_, &dvalue_})
      buffer->assign(rows, 0.0f);
    transposed_.assign(this->dim() * padded_, 0.0f);
    probability_.assign(tokens_ * padded_, 0.0f);
    dprobability_.assign(tokens_ * padded_, 0.0f);
    query_rstd_.assign(tokens_, 0.0f);
    key_rstd_.assign(tokens_, 0.0f);
  }

  int64_t dim() const { return kDim ? kDim : dim_; }

  void Load(const Stream *streams, int count, const float *cos, const float *sin, float eps, int64_t sample,
            int64_t head, int64_t width) {
    int64_t token = 0;
    for (int i = 0; i < count; ++i) {
      const Stream &stream = streams[i];
      for (int64_t s = 0; s < stream.tokens; ++s, ++token) {
        const int64_t at = (sample * stream.tokens + s) * width + head * dim(), row = token * dim();
        query_rstd_[token] = Normalise(stream.query + at, stream.query_bias + head * dim(), stream.query_weight, eps,
                                       cos + row, sin + row, &query_normal_[row], &query_[row]);
        key_rstd_[token] = Normalise(stream.key + at, stream.key_bias + head * dim(), stream.key_weight, eps,
                                     cos + row, sin + row, &key_normal_[row], &key_[row]);
        for (int64_t d = 0; d < dim(); ++d)
          value_[row + d] = stream.value[at + d] + stream.value_bias[head * dim() + d];
      }
    }
  }

  void Softmax() {
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim()));
    ProductTransposed(query_.data(), key_.data(), probability_.data());
    for (int64_t i = 0; i < tokens_; ++i) {
      float *row = &probability_[i * padded_];
      float top = row[0];
      for (int64_t j = 1; j < tokens_; ++j) top = row[j] > top ? row[j] : top;
      float total = 0.0f;
#pragma omp simd reduction(+ : total)
      for (int64_t j = 0; j < tokens_; ++j) {
        row[j] = Exp((row[j] - top) * scale);
        total += row[j];
      }
      const float share = 1.0f / total;
      for (int64_t j = 0; j < tokens_; ++j) row[j] *= share;
    }
  }

  // row i of the output: sum over j of probability[i][j] * value[j]
  void OutputRow(int64_t i, float *out) const { WeightedRows(&probability_[i * padded_], value_.data(), out); }

  float *dout() { return dout_.data(); }

  // Gradients of the rotated query and key and of the value, from `dout`.
  void Backward() {
    const float scale = 1.0f / std::sqrt(static_cast<float>(dim()));
    ProductTransposed(dout_.data(), value_.data(), dprobability_.data());
    std::fill(dkey_.begin(), dkey_.end(), 0.0f);
    std::fill(dvalue_.begin(), dvalue_.end(), 0.0f);
    for (int64_t i = 0; i < tokens_; ++i) {
      const float *p = &probability_[i * padded_];
      float *dp = &dprobability_[i * padded_];
      const float mean = Dot(p, dp, tokens_);
#pragma omp simd
      for (int64_t j = 0; j < tokens_; ++j) dp[j] = p[j] * (dp[j] - mean) * scale;
      WeightedRows(dp, key_.data(), &dquery_[i * dim()]);
      AddOuter(dp, &query_[i * dim()], dkey_.data());
      AddOuter(p, &dout_[i * dim()], dvalue_.data());
    }
  }

  // Back through rotation, norm and bias; adds to the gradients of biases and norm weights.
  void Store(const Stream *streams, const StreamGrad *grads, int count, const float *cos, const float *sin,
             int64_t sample, int64_t head, int64_t width) {
    int64_t token = 0;
    for (int i = 0; i < count; ++i) {
      const Stream &stream = streams[i];
      const StreamGrad &grad = grads[i];
      for (int64_t s = 0; s < stream.tokens; ++s, ++token) {
        const int64_t at = (sample * stream.tokens + s) * width + head * dim(), row = token * dim();
        NormaliseGrad(&dquery_[row], stream.query_weight, cos + row, sin + row, &query_normal_[row],
                      query_rstd_[token], grad.query + at, grad.query_bias + head * dim(), grad.query_weight);
        NormaliseGrad(&dkey_[row], stream.key_weight, cos + row, sin + row, &key_normal_[row], key_rstd_[token],
                      grad.key + at, grad.key_bias + head * dim(), grad.key_weight);
        for (int64_t d = 0; d < dim(); ++d) {
          grad.value[at + d] = dvalue_[row + d];
          grad.value_bias[head * dim() + d] += dvalue_[row + d];
        }
      }
    }
  }

 private:
  float Normalise(const float *x, const float *bias, const float *weight, float eps, const float *cos,
                  const float *sin, float *normal, float *out) const {
    float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
    for (int64_t d = 0; d < dim(); ++d) {
      normal[d] = x[d] + bias[d];
      squares += normal[d] * normal[d];
    }
    const float rstd = 1.0f / std::sqrt(squares / dim() + eps);
    for (int64_t d = 0; d < dim(); ++d) normal[d] *= rstd;
    for (int64_t d = 0; d < dim(); d += 2) {
      const float even = normal[d] * weight[d], odd = normal[d + 1] * weight[d + 1];
      out[d] = even * cos[d] - odd * sin[d];
      out[d + 1] = odd * cos[d + 1] + even * sin[d + 1];
    }
    return rstd;
  }

  // dout is overwritten with the gradient of the normalised vector.
  void NormaliseGrad(float *dout, const float *weight, const float *cos, const float *sin, const float *normal,
                     float rstd, float *dx, float *dbias, float *dweight) const {
    for (int64_t d = 0; d < dim(); d += 2) {
      const float even = dout[d] * cos[d] + dout[d + 1] * sin[d + 1];
      const float odd = dout[d + 1] * cos[d + 1] - dout[d] * sin[d];
      dout[d] = even;
      dout[d + 1] = odd;
    }
    float mean = 0.0f;
#pragma omp simd reduction(+ : mean)
    for (int64_t d = 0; d < dim(); ++d) {
      dweight[d] += dout[d] * normal[d];
      dout[d] *= weight[d];
      mean += dout[d] * normal[d];
    }
    mean /= dim();
    for (int64_t d = 0; d < dim(); ++d) {
      dx[d] = rstd * (dout[d] - normal[d] * mean);
      dbias[d] += dx[d];
    }
  }

  // out[i][j] = sum over d of left[i][d] * right[j][d], rows of `padded_` numbers.
  void ProductTransposed(const float *left, const float *right, float *out) {
    for (int64_t j = 0; j < tokens_; ++j)
      for (int64_t d = 0; d < dim(); ++d) transposed_[d * padded_ + j] = right[j * dim() + d];
    for (int64_t i = 0; i < tokens_; ++i) {
      for (int64_t start = 0; start < padded_; start += 16) {
        float sums[16] = {0.0f};
        for (int64_t d = 0; d < dim(); ++d) {
          const float factor = left[i * dim() + d], *column = &transposed_[d * padded_ + start];
#pragma omp simd
          for (int j = 0; j < 16; ++j) sums[j] += factor * column[j];
        }
        std::memcpy(out + i * padded_ + start, sums, sizeof(sums));
      }
    }
  }

  // out = sum over j of weights[j] * rows[j]
  void WeightedRows(const float *weights, const float *rows, float *out) const {
    if constexpr (kDim > 0) {
      float sums[kDim] = {0.0f};
      for (int64_t j = 0; j < tokens_; ++j) {
#pragma omp simd
        for (int d = 0; d < kDim; ++d) sums[d] += weights[j] * rows[j * kDim + d];
      }
      std::memcpy(out, sums, sizeof(sums));
    } else {
      std::fill(out, out + dim(), 0.0f);
      for (int64_t j = 0; j < tokens_; ++j)
        for (int64_t d = 0; d < dim(); ++d) out[d] += weights[j] * rows[j * dim() + d];
    }
  }

  // rows[j] += weights[j] * x
  void AddOuter(const float *weights, const float *x, float *rows) const {
    for (int64_t j = 0; j < tokens_; ++j) {
#pragma omp simd
      for (int64_t d = 0; d < dim(); ++d) rows[j * dim() + d] += weights[j] * x[d];
    }
  }

  int64_t tokens_, dim_, padded_;
  std::vector<float> query_, key_, value_, query_normal_, key_normal_, dout_, dquery_, dkey_, dvalue_;
  std::vector<float> transposed_, probability_, dprobability_, query_rstd_, key_rstd_;
};

template <int kDim>
void Attention(const Stream *streams, int count, const float *cos, const float *sin, float eps, int64_t batch,
               int64_t width, int64_t dim, float *const *outs) {
  int64_t tokens = 0;
  for (int i = 0; i < count; ++i) tokens += streams[i].tokens;
#pragma omp parallel
  {
    Head<kDim> work(tokens, dim);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < batch; ++b) {
      for (int64_t head = 0; head < width / dim; ++head) {
        work.Load(streams, count, cos, sin, eps, b, head, width);
        work.Softmax();
        int64_t token = 0;
        for (int i = 0; i < count; ++i)
          for (int64_t s = 0; s < streams[i].tokens; ++s, ++token)
            work.OutputRow(token, outs[i] + (b * streams[i].tokens + s) * width + head * dim);
      }
    }
  }
}

template <int kDim>
void AttentionGrad(const Stream *streams, const StreamGrad *grads, int count, const float *cos, const float *sin,
                   float eps, const float *const *douts, int64_t batch, int64_t width, int64_t dim) {
  int64_t tokens = 0;
  for (int i = 0; i < count; ++i) tokens += streams[i].tokens;
  const int64_t shared = 3 * width + 2 * dim;  // gradients of biases and norm weights of a stream
  std::vector<float> partial(kParts * count * shared, 0.0f);
#pragma omp parallel
  {
    Head<kDim> work(tokens, dim);
#pragma omp for schedule(static)
    for (int part = 0; part < kParts; ++part) {
      StreamGrad own[2];
      for (int i = 0; i < count; ++i) {
        float *row = partial.data() + (part * count + i) * shared;
        own[i] = {grads[i].query,   grads[i].key,    grads[i].value,  row,
                  row + width,      row + 2 * width, row + 3 * width, row + 3 * width + dim};
      }
      for (int64_t b = PartStart(batch, part); b < PartStart(batch, part + 1); ++b) {
        for (int64_t head = 0; head < width / dim; ++head) {
          work.Load(streams, count, cos, sin, eps, b, head, width);
          work.Softmax();
          int64_t token = 0;
          for (int i = 0; i < count; ++i)
            for (int64_t s = 0; s < streams[i].tokens; ++s, ++token)
              std::memcpy(work.dout() + token * dim,
                          douts[i] + (b * streams[i].tokens + s) * width + head * dim, dim * sizeof(float));
          work.Backward();
          work.Store(streams, own, count, cos, sin, b, head, width);
        }
      }
    }
  }
  std::vector<float> total(count * shared);
  SumParts(partial, count * shared, total.data());
  for (int i = 0; i < count; ++i) {
    const float *row = total.data() + i * shared;
    std::copy(row, row + width, grads[i].query_bias);
    std::copy(row + width, row + 2 * width, grads[i].key_bias);
    std::copy(row + 2 * width, row + 3 * width, grads[i].value_bias);
    std::copy(row + 3 * width, row + 3 * width + dim, grads[i].query_weight);
    std::copy(row + 3 * width + dim, row + shared, grads[i].key_weight);
  }
}

// Inputs: for each stream query, key, value, their biases, the norms' weights; then cos, sin, eps.
constexpr int kStreamInputs = 8;

Stream StreamAt(const Args &a, int first) {
  return {a.at(first),     a.at(first + 1), a.at(first + 2), a.at(first + 3),
          a.at(first + 4), a.at(first + 5), a.at(first + 6), a.at(first + 7), a.dim(first, 1)};
}

template <int kDim>
int RunAttention(const Args &a, int count, bool backward) {
  Stream streams[2];
  for (int i = 0; i < count; ++i) streams[i] = StreamAt(a, i * kStreamInputs);
  const int rest = count * kStreamInputs;
  const float *cos = a.at(rest), *sin = a.at(rest + 1), eps = *a.at(rest + 2);
  const int64_t batch = a.dim(0, 0), width = a.dim(0, 2), dim = a.dim(6, 0);
  if (!backward) {
    float *outs[2] = {a.at(rest + 3), count > 1 ? a.at(rest + 4) : nullptr};
    Attention<kDim>(streams, count, cos, sin, eps, batch, width, dim, outs);
    return 0;
  }
  const float *douts[2] = {a.at(rest + 3), count > 1 ? a.at(rest + 4) : nullptr};
  StreamGrad grads[2];
  for (int i = 0; i < count; ++i) {
    const int first = rest + 3 + count + i * kStreamInputs;
    grads[i] = {a.at(first),     a.at(first + 1), a.at(first + 2), a.at(first + 3),
                a.at(first + 4), a.at(first + 5), a.at(first + 6), a.at(first + 7)};
  }
  AttentionGrad<kDim>(streams, grads, count, cos, sin, eps, douts, batch, width, dim);
  return 0;
}

int DispatchAttention(const Args &a, int count, bool backward) {
  switch (a.dim(6, 0)) {
    case 32: return RunAttention<32>(a, count, backward);
    case 64: return RunAttention<64>(a, count, backward);
    case 128: return RunAttention<128>(a, count, backward);
    default: return RunAttention<0>(a, count, backward);
  }
}

int64_t Rows(const Args &a, int ndim) {  // of input 0, all axes but the last
  int64_t rows = 1;
  for (int i = 0; i + 1 < ndim; ++i) rows *= a.dim(0, i);
  return rows;
}

}  // namespace

#define KERNEL(name) \
  extern "C" int name(int, void **params, [[maybe_unused]] int *ndims, int64_t **shapes, const char **, void *, void *)
#define ARGS const Args a{params, shapes}

KERNEL(modulated_layer_norm) {
  if (ndims[0] != 3) return 1;
  ARGS;
  ModulatedLayerNorm(a.at(0), a.at(1), a.at(2), *a.at(3), a.dim(0, 0), a.dim(0, 1), a.dim(0, 2), a.at(4));
  return 0;
}

KERNEL(modulated_layer_norm_grad) {
  if (ndims[0] != 3) return 1;
  ARGS;
  ModulatedLayerNormGrad(a.at(0), a.at(1), *a.at(2), a.at(3), a.dim(0, 0), a.dim(0, 1), a.dim(0, 2), a.at(4), a.at(5),
                         a.at(6));
  return 0;
}

KERNEL(gated_residual) {
  if (ndims[0] != 3) return 1;
  ARGS;
  GatedResidual(a.at(0), a.at(1), a.at(2), a.at(3), a.dim(0, 0), a.dim(0, 1), a.dim(0, 2), a.at(4));
  return 0;
}

KERNEL(gated_residual_grad) {
  if (ndims[1] != 3) return 1;
  ARGS;
  GatedResidualGrad(a.at(0), a.at(1), a.at(2), a.at(3), a.dim(1, 0), a.dim(1, 1), a.dim(1, 2), a.at(4), a.at(5),
                    a.at(6));
  return 0;
}

KERNEL(bias_gelu) {
  ARGS;
  BiasGelu(a.at(0), a.at(1), Rows(a, ndims[0]), a.dim(1, 0), a.at(2));
  return 0;
}

KERNEL(bias_gelu_grad) {
  ARGS;
  BiasGeluGrad(a.at(0), a.at(1), a.at(2), Rows(a, ndims[0]), a.dim(1, 0), a.at(3), a.at(4));
  return 0;
}

KERNEL(rotary_attention) { ARGS; return DispatchAttention(a, 1, false); }
KERNEL(rotary_attention_grad) { ARGS; return DispatchAttention(a, 1, true); }
KERNEL(joint_rotary_attention) { ARGS; return DispatchAttention(a, 2, false); }
KERNEL(joint_rotary_attention_grad) { ARGS; return DispatchAttention(a, 2, true); }
