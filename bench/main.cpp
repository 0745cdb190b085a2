#include "harness.hpp"

#include WORKBOOK_STAGE_HEADER
#ifdef WORKBOOK_STAGE_BEFORE
#include WORKBOOK_STAGE_BEFORE_HEADER
#endif

int main(int argc, char** argv) {
    const workbook::Stage* before = nullptr;
#ifdef WORKBOOK_STAGE_BEFORE
    before = &WORKBOOK_STAGE_BEFORE::stage();
#endif
    return workbook::bench::bench_main(WORKBOOK_STAGE::stage(), argc, argv, before);
}
