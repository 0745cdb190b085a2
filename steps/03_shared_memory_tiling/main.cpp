#include "03_shared_memory_tiling/stage.hpp"
#include "stage/runner.hpp"

int main(int argc, char** argv) { return workbook::stage_main(step03::stage(), argc, argv); }
