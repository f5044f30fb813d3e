// y = sum over pairs of weight * w2 h, for the rows of h by position; a linear's product is one of these as well.
#pragma once
#include "cpu/moe/prepare.h"

namespace quantmoe {

class Down {
 public:
  ExpertMatrix w2;

  // weights: of the call's pairs, or null: 1. output: [all tokens, N] of the layer's type.
  Down(const LayerCall& layer, const qm_projection& node, const PanelMatrix& panel, const RowParts& parts,
       const void* rows, const float* weights, void* output);
  // Of a divided layer.
  void plan();
  int64_t most_tasks() const { return column_ranges_; }
  void lay_out_tokens(Arena& arena);
  void lay_out(Arena& arena);

  // Prepares the rows of h and lays them out as tiles [first, last) of an expert.
  void pack(int lane, int64_t expert, int64_t first, int64_t last, const Hidden& from, const RowScratch& scratch,
            uint8_t* bad_tokens);
  // Multiplies the round's experts. After the last round writes the output, NaN for bad tokens.
  void multiply() const;

 private:
  void multiply_range(int lane, int64_t begin, int64_t end) const;
  void multiply_tiles(int lane, int64_t expert, const TokenTile* tiles, int64_t count, int64_t first, int64_t rows,
                      int64_t begin, int64_t end, float* y) const;
  float* sums() const;  // y, or the output where that is f32

  const LayerCall& layer_;
  const float* weights_;
  uint8_t* output_;
  int64_t column_ranges_ = 1;
  uint8_t* tiles_{};  // [pairs, tile_bytes]
  float* y_{};        // [tokens, N]
};

}  // namespace quantmoe
