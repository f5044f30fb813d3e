#include "quantmoe/quant_moe.h"

const char* qm_version(void) { return "0.1.0"; }
