// Where the states of a warp's queries are kept between splits, and how one is folded into another.
// Each lane reads and writes its own elements only, so that no barrier is needed.
#pragma once

#include "cuda/attend_tensor_core.cuh"

namespace kvpager::gpu::tensor {

// In scratch, one state per query. Each lane of a quad has m and l of its own, so that none reads what
// another has folded already.
struct ScratchStore {
  float* at[2];  // null: unused
  int32_t v_dim = 0;

  KVP_DEVICE void load(int n, float (&a)[4]) const {
    KVP_UNROLL
    for (int half = 0; half < 2; ++half) {
      const Float2 pair = at[half] == nullptr ? Float2{{0.0f, 0.0f}} : *pair_at(half, 8 * n);
      a[2 * half] = pair.x[0];
      a[2 * half + 1] = pair.x[1];
    }
  }
  KVP_DEVICE void save(int n, const float (&a)[4]) const {
    KVP_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (at[half] != nullptr) *pair_at(half, 8 * n) = Float2{{a[2 * half], a[2 * half + 1]}};
    }
  }
  KVP_DEVICE void load_sums(float (&m)[2], float (&l)[2]) const {
    KVP_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (at[half] == nullptr) {
        m[half] = kMinusInfinity;
        l[half] = 0.0f;
      } else {
        const Float2 pair = *pair_at(half, v_dim);
        m[half] = pair.x[0];
        l[half] = pair.x[1];
      }
    }
  }
  KVP_DEVICE void save_sums(const float (&m)[2], const float (&l)[2]) const {
    KVP_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (at[half] != nullptr) {
        *pair_at(half, v_dim) = Float2{{m[half], l[half]}};
      }
    }
  }

 private:
  KVP_DEVICE Float2* pair_at(int half, int dim) const {
    return reinterpret_cast<Float2*>(at[half] + dim + lane_index() % 4 * 2);
  }
};

// In shared memory, as the block's threads hold them: [v_dim / 8 + 1][threads] of 16 bytes, which
// has no bank conflicts.
struct SharedStore {
  Float4* mine = nullptr;  // this thread's first
  int32_t stride = 0;      // threads
  int32_t sums = 0;        // v_dim / 8

  KVP_DEVICE void load(int n, float (&a)[4]) const {
    const Float4 four = mine[n * stride];
    KVP_UNROLL
    for (int e = 0; e < 4; ++e) a[e] = four.x[e];
  }
  KVP_DEVICE void save(int n, const float (&a)[4]) const {
    mine[n * stride] = Float4{{a[0], a[1], a[2], a[3]}};
  }
  KVP_DEVICE void load_sums(float (&m)[2], float (&l)[2]) const {
    const Float4 four = mine[sums * stride];
    m[0] = four.x[0], m[1] = four.x[1], l[0] = four.x[2], l[1] = four.x[3];
  }
  KVP_DEVICE void save_sums(const float (&m)[2], const float (&l)[2]) const {
    mine[sums * stride] = Float4{{m[0], m[1], l[0], l[1]}};
  }
};

template <int kBlocks, class Store>
KVP_DEVICE void clear(const Store& store, const float (&m)[2], const float (&l)[2]) {
  const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  KVP_UNROLL
  for (int n = 0; n < kBlocks; ++n) store.save(n, zeros);
  store.save_sums(m, l);
}

template <int kBlocks, class Store>
KVP_DEVICE void clear(const Store& store) {
  const float m[2] = {kMinusInfinity, kMinusInfinity};
  const float l[2] = {0.0f, 0.0f};
  clear<kBlocks>(store, m, l);
}

template <int kBlocks, class Store>
KVP_DEVICE void put(const Store& store, const float (&acc)[kBlocks][4], const float (&m)[2],
                    const float (&l)[2]) {
  KVP_UNROLL
  for (int n = 0; n < kBlocks; ++n) store.save(n, acc[n]);
  store.save_sums(m, l);
}

template <int kBlocks, class Store>
KVP_DEVICE void take(const Store& store, float (&acc)[kBlocks][4], float (&m)[2], float (&l)[2]) {
  KVP_UNROLL
  for (int n = 0; n < kBlocks; ++n) store.load(n, acc[n]);
  store.load_sums(m, l);
}

// What the registers hold into what is stored. A half that holds nothing changes nothing.
template <int kBlocks, class Store>
KVP_DEVICE void fold_into(const Store& store, const float (&acc)[kBlocks][4], const float (&m)[2],
                          const float (&l)[2]) {
  float into_m[2], into_l[2];
  store.load_sums(into_m, into_l);
  Weights weights[2];
  bool live[2];
  KVP_UNROLL
  for (int half = 0; half < 2; ++half) {
    live[half] = holds(m[half], l[half]);
    weights[half] = fold_weights(into_m[half], m[half]);
    if (live[half]) {
      into_l[half] = fold(weights[half], into_l[half], l[half]);
      into_m[half] = weights[half].m;
    }
  }
  if (ballot(live[0] || live[1]) == 0) return;
  KVP_UNROLL
  for (int n = 0; n < kBlocks; ++n) {
    // Else all is loaded first, which takes more registers than there are.
    if (kBlocks > 8 && n % 4 == 0) sync_warp();  // for registers
    float a[4];
    store.load(n, a);
    KVP_UNROLL
    for (int e = 0; e < 4; ++e) {
      a[e] = live[e >> 1] ? fold(weights[e >> 1], a[e], acc[n][e]) : a[e];
    }
    store.save(n, a);
  }
  store.save_sums(into_m, into_l);
}

// States of a warp's queries, where `at` says that the one of a row and a query head is.
template <int kM, class At>
KVP_DEVICE ScratchStore store_at(const AttendParams& p, const Queries<kM>& queries, int m,
                                 const At& at) {
  ScratchStore store;
  store.v_dim = p.shape.v_dim;
  KVP_UNROLL
  for (int half = 0; half < 2; ++half) {
    store.at[half] =
        queries.row[m][half] < 0 ? nullptr : at(queries.index(m, half), queries.q_head(m, half));
  }
  return store;
}
template <int kM>
KVP_DEVICE ScratchStore unit_store(const AttendParams& p, const Plan& plan,
                                   const Queries<kM>& queries, int m, int64_t unit) {
  return store_at(p, queries, m, [&](int64_t index, int q_head) {
    return state_at(p, plan, index, q_head, unit);
  });
}
template <int kM>
KVP_DEVICE ScratchStore total_store(const AttendParams& p, const Queries<kM>& queries, int m) {
  return store_at(p, queries, m,
                  [&](int64_t index, int q_head) { return total_at(p, index, q_head); });
}

// The empty total: nothing, or the head's sink.
KVP_DEVICE void start_total(const AttendParams& p, int q_head, float* m, float* l) {
  *m = p.sinks == nullptr ? kMinusInfinity : p.sinks[q_head] * kLog2E;
  *l = p.sinks == nullptr ? 0.0f : 1.0f;
}

template <int kDim, int kM>
KVP_DEVICE void clear_total(const Launch& launch, const Queries<kM>& queries, int i,
                            const ScratchStore& total) {
  float m[2] = {kMinusInfinity, kMinusInfinity};
  float l[2] = {0.0f, 0.0f};
  KVP_UNROLL
  for (int half = 0; half < 2; ++half) {
    if (queries.row[i][half] >= 0) {
      start_total(launch.attend, queries.q_head(i, half), &m[half], &l[half]);
    }
  }
  clear<kDim / 8>(total, m, l);
}

template <int kDim, int kM>
KVP_DEVICE void write_total(const Launch& launch, const Queries<kM>& queries, int i,
                            const ScratchStore& total) {
  float m[2], l[2];
  total.load_sums(m, l);
  for (int n = 0; n < kDim / 8; ++n) {
    float a[4];
    total.load(n, a);
    KVP_UNROLL
    for (int half = 0; half < 2; ++half) {
      if (queries.row[i][half] < 0) continue;
      const bool any = holds(m[half], l[half]);
      write_out_pair(launch, queries.row[i][half], queries.q_head(i, half),
                     8 * n + lane_index() % 4 * 2, any ? finish(a[2 * half], l[half]) : 0.0f,
                     any ? finish(a[2 * half + 1], l[half]) : 0.0f);
    }
  }
}

}  // namespace kvpager::gpu::tensor
