#include "b_varlen/stage.hpp"
#include "stage/runner.hpp"

int main(int argc, char** argv) { return workbook::stage_main(stepb::stage(), argc, argv); }
