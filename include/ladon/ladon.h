// Everything: includes the other headers and adds nothing.
#pragma once

#include "ladon/attention.h"
#include "ladon/attention_layer.h"
#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/error.h"
#include "ladon/head_ops.h"
#include "ladon/isa.h"
#include "ladon/multi_head_attention.h"
#include "ladon/optim.h"
#include "ladon/parameter.h"
#include "ladon/random.h"
#include "ladon/rope.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"
#include "ladon/version.h"
