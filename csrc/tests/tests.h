// All tests of the core.
#pragma once

namespace weightsync::testing {

void test_moves_are_what_single_elements_say();
void test_all_kernels_agree();
void test_large_tables_stream_on_several_threads();
void test_plain_copies_of_any_size_and_alignment();
void test_bad_rows_are_named();

void test_a_reader_follows_a_writer();
void test_a_watermark_that_stands_still_is_a_timeout();
void test_a_reader_is_cancelled_or_evicted_while_it_waits();
void test_a_reader_waits_until_the_slot_is_opened();
void test_an_older_generation_is_refused_although_all_bytes_are_there();

void test_exchanged_pages_keep_their_contents();
void test_whichever_step_fails_everything_is_where_it_was();
void test_a_failed_exchange_leaves_everything_where_it_was();
void test_ranges_that_overlap_or_end_within_a_page_are_refused();
void test_population_keeps_contents_and_reports_what_is_not_mapped();

}  // namespace weightsync::testing
