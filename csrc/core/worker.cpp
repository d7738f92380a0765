#include "worker.h"

#include <algorithm>
#include <cstring>

#include "digest.h"
#include "gather.h"
#include "memory.h"

namespace weightsync {
namespace {

constexpr std::int64_t kLine = 64;
constexpr std::int64_t kStreamCopyBytes = 32768;
constexpr std::int64_t kStretchBytes = 65536;  // stays in the second-level cache
constexpr std::int64_t kVectorBytes = 32;

// The factors of a word's place, those of the other half a block behind.
const std::int16_t* factors_of(std::int64_t word) {
  return &kBlockFactors.f[0][static_cast<std::size_t>(word & (kBlock - 1))];
}

// Calls visit(place) for each combination of the axes of `box` but the last and `partner`.
template <class Place, class Visit>
void walk(const Axis* axes, const std::int64_t* counts, int last, int partner, Place at, const Visit& visit) {
  std::array<std::int64_t, kMaxAxes> turn{};
  for (;;) {
    visit(at);
    int d = last - 1;
    for (; d >= 0; --d) {
      if (d == partner) continue;
      const auto i = static_cast<std::size_t>(d);
      at.src += axes[d].src;
      at.dst += axes[d].dst;
      at.index += axes[d].index;
      if (++turn[i] < counts[d]) break;
      at.src -= axes[d].src * counts[d];
      at.dst -= axes[d].dst * counts[d];
      at.index -= axes[d].index * counts[d];
      turn[i] = 0;
    }
    if (d < 0) return;
  }
}

// Adds to a digest that other threads add to; halves must not carry into each other.
void add_shared(std::uint64_t& digest, std::uint64_t part) {
  std::uint64_t seen = __atomic_load_n(&digest, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&digest, &seen, add_halves(seen, part), true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
}

}  // namespace

Worker::Worker(const Schedule& schedule, const Operands& operands)
    : schedule_(schedule),
      operands_(operands),
      kernels_(kernels()),
      has_dst_(!operands.dst.empty()),
      has_digest_(!operands.digests.empty()) {}

void Worker::run(const Unit& unit) {
  for (std::uint32_t i = 0; i < unit.pieces; ++i) run_piece(schedule_.pieces[unit.first_piece + i]);
}

void Worker::run_piece(const Piece& piece) {
  const Job& job = schedule_.jobs[piece.job];
  const Axis* axes = schedule_.axes.data() + job.first_axis;
  const int last = job.axes - 1;
  const bool is_whole = piece.box == Piece::kWhole;
  job_ = &job;
  src_item_ = item_bytes(job.src_type);
  dst_item_ = item_bytes(job.dst_type);
  words_ = words_of(dst_item_);
  set_ = kernels_.find(job.src_type, job.dst_type);
  std::uint64_t part = 0;
  sum_ = has_digest_ && is_whole ? &operands_.digests[job.row] : &part;

  // Addresses are computed as integers: a piece may start outside of any object that the language knows.
  Place at{reinterpret_cast<const std::byte*>(operands_.src[job.row]),
           has_dst_ ? reinterpret_cast<std::byte*>(operands_.dst[job.row]) : nullptr, job.index};
  std::array<std::int64_t, kMaxAxes> counts{};
  for (int d = 0; d <= last; ++d) {
    const auto i = static_cast<std::size_t>(d);
    counts[i] = is_whole ? axes[d].count : schedule_.boxes[piece.box].count[i];
    const std::int64_t start = is_whole ? 0 : schedule_.boxes[piece.box].start[i];
    at.src += start * axes[d].src;
    at.dst += start * axes[d].dst;
    at.index += start * axes[d].index;
  }

  Axis columns = axes[last];
  columns.count = counts[static_cast<std::size_t>(last)];
  const bool is_direct = set_ != nullptr && columns.src == src_item_ && (!has_dst_ || columns.dst == dst_item_) &&
                         (!has_digest_ || columns.index == 1);
  if (is_direct) {
    walk(axes, counts.data(), last, -1, at, [&](const Place& row) { run_row(row, columns.count); });
  } else {
    cast_ = find_cast(job.src_type, job.dst_type);
    set_ = &kernels_.raw(dst_item_);
    Axis rows{1, 0, 0, 0};
    if (job.partner >= 0) {
      rows = axes[job.partner];
      rows.count = counts[static_cast<std::size_t>(job.partner)];
    }
    walk(axes, counts.data(), last, job.partner, at, [&](const Place& plane) { run_plane(plane, rows, columns); });
  }
  if (has_digest_ && !is_whole) {
    add_shared(operands_.digests[job.row], part);
  }
}

// Contiguous on both sides.
void Worker::run_row(const Place& at, std::int64_t count) {
  if (!has_digest_ && job_->src_type == job_->dst_type) {
    if (!has_dst_) return;
    const std::int64_t bytes = count * src_item_;
    if (operands_.streams && bytes >= kStreamCopyBytes) {
      stream_copy(at.dst, at.src, static_cast<std::size_t>(bytes));
    } else {
      std::memcpy(at.dst, at.src, static_cast<std::size_t>(bytes));
    }
    return;
  }
  if (has_dst_ && operands_.streams && job_->src_type == job_->dst_type &&
      reinterpret_cast<std::uintptr_t>(at.dst) % kVectorBytes != 0) {
    return run_misaligned_row(at, count);
  }
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t index = has_digest_ ? at.index + done : done;
    const std::int64_t step = std::min(count - done, left_in_block(index));
    const std::byte* src = at.src + done * src_item_;
    if (has_dst_) {
      const CopyKernel kernel = operands_.streams ? set_->stream : set_->copy;
      copy_part(kernel, {src, at.dst + done * dst_item_, index}, static_cast<std::size_t>(step));
    } else {
      digest_part(src, index, static_cast<std::size_t>(step));
    }
    done += step;
  }
}

// Streaming stores want an aligned destination, and no other store may touch their lines. The blocks of this row start
// anywhere in a line, so a stretch is digested first and then copied, warm, as one.
void Worker::run_misaligned_row(const Place& at, std::int64_t count) {
  const std::int64_t stretch = kStretchBytes / dst_item_;
  for (std::int64_t first = 0; first < count; first += stretch) {
    const std::int64_t last = std::min(count, first + stretch);
    for (std::int64_t done = first; done < last;) {
      const std::int64_t step = std::min(last - done, left_in_block(at.index + done));
      digest_part(at.src + done * src_item_, at.index + done, static_cast<std::size_t>(step));
      done += step;
    }
    stream_copy(at.dst + first * dst_item_, at.src + first * src_item_,
                static_cast<std::size_t>((last - first) * dst_item_));
  }
}

void Worker::run_plane(const Place& at, const Axis& rows, const Axis& columns) {
  const std::int64_t height = std::min(rows.count, kLine / std::min(src_item_, dst_item_));
  const std::int64_t width = static_cast<std::int64_t>(kTileBytes) / (height * std::max(src_item_, dst_item_));
  for (std::int64_t r = 0; r < rows.count; r += height) {
    for (std::int64_t c = 0; c < columns.count; c += width) {
      Axis tile_rows = rows, tile_columns = columns;
      tile_rows.count = std::min(height, rows.count - r);
      tile_columns.count = std::min(width, columns.count - c);
      run_tile({at.src + r * rows.src + c * columns.src, at.dst + r * rows.dst + c * columns.dst,
                at.index + r * rows.index + c * columns.index},
               tile_rows, tile_columns);
    }
  }
}

// Gather, cast, digest and scatter, as far as each is needed, through buffers in the first-level cache.
void Worker::run_tile(const Place& at, const Axis& rows, const Axis& columns) {
  const bool gathers = columns.src != src_item_;
  const bool scatters = has_dst_ && columns.dst != dst_item_;
  const std::int64_t src_pitch = columns.count * src_item_, dst_pitch = columns.count * dst_item_;
  if (gathers) {
    copy_matrix({gathered_, src_pitch, src_item_}, {at.src, rows.src, columns.src}, rows.count, columns.count,
                src_item_);
  }
  for (std::int64_t r = 0; r < rows.count; ++r) {
    Place row{gathers ? gathered_ + r * src_pitch : at.src + r * rows.src, nullptr, at.index + r * rows.index};
    if (has_dst_) row.dst = scatters ? scattered_ + r * dst_pitch : at.dst + r * rows.dst;
    if (cast_ != nullptr) {
      cast_(row.src, cast_row_, static_cast<std::size_t>(columns.count));
      row.src = cast_row_;
    }
    if (has_digest_) {
      digest_row(row, columns.count, columns.index);
    } else if (has_dst_) {
      std::memcpy(row.dst, row.src, static_cast<std::size_t>(dst_pitch));
    }
  }
  if (scatters) {
    copy_matrix({at.dst, rows.dst, columns.dst}, {scattered_, dst_pitch, dst_item_}, rows.count, columns.count,
                dst_item_);
  }
}

// Digests a contiguous row whose elements are `index_step` apart in the tensor; copies it if there is a destination.
void Worker::digest_row(const Place& at, std::int64_t count, std::int64_t index_step) {
  if (index_step != 1) {
    if (at.dst != nullptr) std::memcpy(at.dst, at.src, static_cast<std::size_t>(count * dst_item_));
    for (std::int64_t i = 0; i < count; ++i) {
      std::uint64_t bits = 0;  // little-endian, as all that we run on
      std::memcpy(&bits, at.src + i * dst_item_, static_cast<std::size_t>(dst_item_));
      const std::int64_t index = at.index + i * index_step;
      for (std::int64_t w = 0; w < words_; ++w) {
        const std::int64_t word = index * words_ + w;
        const std::int16_t* f = factors_of(word);
        const std::uint64_t factors = join(static_cast<std::uint32_t>(f[0]), static_cast<std::uint32_t>(f[kBlock]));
        const std::uint32_t value = word_value(bits, w);
        add(multiply_halves(join(value, value), factors), word);
      }
    }
    return;
  }
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t index = at.index + done;
    const std::int64_t step = std::min(count - done, left_in_block(index));
    const std::byte* src = at.src + done * dst_item_;
    if (at.dst != nullptr) {
      copy_part(set_->copy, {src, at.dst + done * dst_item_, index}, static_cast<std::size_t>(step));
    } else {
      digest_part(src, index, static_cast<std::size_t>(step));
    }
    done += step;
  }
}

// Copies a run within one block of the digest.
void Worker::copy_part(CopyKernel kernel, const Place& at, std::size_t count) {
  const std::int64_t word = at.index * words_;
  const std::uint64_t sum = kernel(at.src, at.dst, count, factors_of(word));
  if (has_digest_) add(sum, word);
}

// The same without copying.
void Worker::digest_part(const std::byte* src, std::int64_t index, std::size_t count) {
  const std::int64_t word = index * words_;
  add(set_->digest(src, count, factors_of(word)), word);
}

// Adds what was summed up in the block of `word`.
void Worker::add(std::uint64_t sum, std::int64_t word) {
  const std::uint64_t a = factor_a(job_->seed, static_cast<std::uint64_t>(word >> kBlockBits));
  *sum_ = add_halves(*sum_, multiply_halves(sum, a));
}

// Elements from `index` to the end of its block.
std::int64_t Worker::left_in_block(std::int64_t index) const {
  return (kBlock - (index * words_ & (kBlock - 1))) / words_;
}

}  // namespace weightsync
