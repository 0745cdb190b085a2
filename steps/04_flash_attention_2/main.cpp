#include "04_flash_attention_2/stage.hpp"
#include "stage/runner.hpp"

int main(int argc, char** argv) { return workbook::stage_main(step04::stage(), argc, argv); }
