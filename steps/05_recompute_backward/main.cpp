#include "05_recompute_backward/stage.hpp"
#include "stage/runner.hpp"

int main(int argc, char** argv) { return workbook::stage_main(step05::stage(), argc, argv); }
