// Page tables: exchange of two mappings, and population.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weightsync {

// Exchanges the pages of [a, a + size) and [b, b + size), each one mapping; returns the seconds it took. `scratch`: a
// reserved range of `size` bytes, reserved again afterwards. On failure everything is where it was; throws
// std::system_error that names the step, or std::invalid_argument for ranges that overlap or end within a page.
double exchange(std::uintptr_t a, std::uintptr_t b, std::uintptr_t scratch, std::size_t size);

// Fills the page tables of a range, contents unchanged. Throws std::system_error.
void populate(std::uintptr_t address, std::size_t size, bool for_writing);

}  // namespace weightsync
