#include "02_online_softmax/stage.hpp"
#include "stage/runner.hpp"

int main(int argc, char** argv) { return workbook::stage_main(step02::stage(), argc, argv); }
