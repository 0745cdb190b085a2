#include "06_hopper/stage.hpp"
#include "stage/runner.hpp"

int main(int argc, char** argv) { return workbook::stage_main(step06::stage(), argc, argv); }
