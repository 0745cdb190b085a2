#include "harness.hpp"

#include WORKBOOK_STAGE_HEADER

int main(int argc, char** argv) { return workbook::bench::bench_main(WORKBOOK_STAGE::stage(), argc, argv); }
