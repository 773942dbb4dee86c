// How kernels for NEON read rows of activations. Their instructions multiply a vector by one lane of another vector, and 4
// rows are the lanes of one vector.
#pragma once

namespace lowbit {
namespace {

// The vectors that cover R rows. The last vector ends at the last row, so that no byte after the block is read. With fewer
// than 4 rows, each row is in all lanes of its own vector.
template <int R>
struct RowVectors {
  static constexpr int VECTORS = R < 4 ? R : (R + 3) / 4;
  static constexpr int begin(int vector) { return R < 4 ? vector : 4 * vector < R - 4 ? 4 * vector : R - 4; }
  static constexpr int vector_of(int row) { return R < 4 ? row : row / 4; }
  static constexpr int lane_of(int row) { return R < 4 ? 0 : row - begin(row / 4); }
};

}  // namespace
}  // namespace lowbit
