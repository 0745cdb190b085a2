#include "a_split_kv_decode/stage.hpp"
#include "stage/runner.hpp"

int main(int argc, char** argv) { return workbook::stage_main(stepa::stage(), argc, argv); }
