// Runs every test of the core; the exit code says whether all facts hold.

#include <cstdio>

#include "tests.h"

int main() {
  using namespace weightsync::testing;
  const struct {
    const char* name;
    void (*run)();
  } tests[] = {
#define TEST(name) {#name, name}
      TEST(test_moves_are_what_single_elements_say),
      TEST(test_all_kernels_agree),
      TEST(test_large_tables_stream_on_several_threads),
      TEST(test_plain_copies_of_any_size_and_alignment),
      TEST(test_bad_rows_are_named),
      TEST(test_a_reader_follows_a_writer),
      TEST(test_a_watermark_that_stands_still_is_a_timeout),
      TEST(test_a_reader_is_cancelled_or_evicted_while_it_waits),
      TEST(test_a_reader_waits_until_the_slot_is_opened),
      TEST(test_an_older_generation_is_refused_although_all_bytes_are_there),
      TEST(test_exchanged_pages_keep_their_contents),
      TEST(test_whichever_step_fails_everything_is_where_it_was),
      TEST(test_a_failed_exchange_leaves_everything_where_it_was),
      TEST(test_ranges_that_overlap_or_end_within_a_page_are_refused),
      TEST(test_population_keeps_contents_and_reports_what_is_not_mapped),
#undef TEST
  };
  for (const auto& test : tests) {
    std::printf("%s\n", test.name);
    std::fflush(stdout);
    test.run();
  }
}
