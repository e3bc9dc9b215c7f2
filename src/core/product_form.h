// How the operands of a matrix product lie in memory.
#pragma once
#include <cstdint>

namespace fusedstep {

// Of A B.
enum class ProductForm : uint8_t {
  kRowsRows,        // A by rows, and B' by rows: X X', or a symmetric B
  kRowsColumns,     // A by rows, and B by rows: S X
  kColumnsColumns,  // A' by rows, and B by rows: X' X
};

}  // namespace fusedstep
