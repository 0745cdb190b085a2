#include "01_naive/stage.hpp"
#include "stage/runner.hpp"

int main(int argc, char** argv) { return workbook::stage_main(step01::stage(), argc, argv); }
