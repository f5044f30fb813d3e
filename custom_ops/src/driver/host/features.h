#pragma once
#define __THROW
