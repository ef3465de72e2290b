// Numbers with a derivative beside them (forward-mode differentiation): a user's score expression,
// evaluated with them, yields its own derivative.
#pragma once

namespace cupyflash {

/// value + slope * e, where e * e = 0. Made from any number, but turned into none again, except
/// into int, whose slope is 0: that would lose the slope without a word.
template <class T>
struct Dual {
  T value = T(0);
  T slope = T(0);

  Dual() = default;
  __device__ constexpr Dual(T value) : value(value) {}
  __device__ constexpr Dual(T value, T slope) : value(value), slope(slope) {}
  __device__ explicit operator int() const { return int(value); }
  __device__ explicit operator bool() const { return value != T(0); }

  /// f(x) of this x, given f'(x). A slope of 0 stays 0, whatever f' is.
  __device__ Dual through(T f, T derivative) const { return {f, times(slope, derivative)}; }

  __device__ friend Dual operator+(Dual a) { return a; }
  __device__ friend Dual operator-(Dual a) { return {-a.value, -a.slope}; }
  __device__ friend Dual operator+(Dual a, Dual b) {
    return {a.value + b.value, a.slope + b.slope};
  }
  __device__ friend Dual operator-(Dual a, Dual b) {
    return {a.value - b.value, a.slope - b.slope};
  }
  __device__ friend Dual operator*(Dual a, Dual b) {
    return {a.value * b.value, times(a.slope, b.value) + times(b.slope, a.value)};
  }
  __device__ friend Dual operator/(Dual a, Dual b) {
    const T quotient = a.value / b.value;
    return {quotient, times(a.slope, T(1) / b.value) - times(b.slope, quotient / b.value)};
  }

  __device__ friend bool operator<(Dual a, Dual b) { return a.value < b.value; }
  __device__ friend bool operator>(Dual a, Dual b) { return a.value > b.value; }
  __device__ friend bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
  __device__ friend bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
  __device__ friend bool operator==(Dual a, Dual b) { return a.value == b.value; }
  __device__ friend bool operator!=(Dual a, Dual b) { return a.value != b.value; }

  __device__ friend Dual exp(Dual x) {
    const T e = ::exp(x.value);
    return x.through(e, e);
  }
  __device__ friend Dual exp2(Dual x) {
    const T e = ::exp2(x.value);
    return x.through(e, e * T(0.69314718055994531));
  }
  __device__ friend Dual expm1(Dual x) {
    const T e = ::expm1(x.value);
    return x.through(e, e + T(1));
  }
  __device__ friend Dual log(Dual x) { return x.through(::log(x.value), T(1) / x.value); }
  __device__ friend Dual log2(Dual x) {
    return x.through(::log2(x.value), T(1.4426950408889634) / x.value);
  }
  __device__ friend Dual log1p(Dual x) {
    return x.through(::log1p(x.value), T(1) / (T(1) + x.value));
  }
  __device__ friend Dual sqrt(Dual x) {
    const T root = ::sqrt(x.value);
    return x.through(root, T(0.5) / root);
  }
  __device__ friend Dual rsqrt(Dual x) {
    const T root = ::rsqrt(x.value);
    return x.through(root, T(-0.5) * root / x.value);
  }
  __device__ friend Dual tanh(Dual x) {
    const T t = ::tanh(x.value);
    return x.through(t, T(1) - t * t);
  }
  __device__ friend Dual sin(Dual x) { return x.through(::sin(x.value), ::cos(x.value)); }
  __device__ friend Dual cos(Dual x) { return x.through(::cos(x.value), -::sin(x.value)); }
  __device__ friend Dual erf(Dual x) {
    return x.through(::erf(x.value), T(1.1283791670955126) * ::exp(-x.value * x.value));
  }
  __device__ friend Dual pow(Dual x, Dual y) {
    const T power = ::pow(x.value, y.value);
    return {power, times(x.slope, y.value * ::pow(x.value, y.value - T(1))) +
                       times(y.slope, power * ::log(x.value))};
  }
  __device__ friend Dual fma(Dual a, Dual b, Dual c) { return a * b + c; }
  __device__ friend Dual abs(Dual x) { return x.value < T(0) ? -x : x; }
  __device__ friend Dual min(Dual a, Dual b) { return b.value < a.value ? b : a; }
  __device__ friend Dual max(Dual a, Dual b) { return a.value < b.value ? b : a; }
  __device__ friend Dual floor(Dual x) { return {::floor(x.value)}; }
  __device__ friend Dual ceil(Dual x) { return {::ceil(x.value)}; }
  __device__ friend Dual rint(Dual x) { return {::rint(x.value)}; }

  // The names of single precision and of the fast instructions.
  __device__ friend Dual expf(Dual x) { return exp(x); }
  __device__ friend Dual exp2f(Dual x) { return exp2(x); }
  __device__ friend Dual expm1f(Dual x) { return expm1(x); }
  __device__ friend Dual logf(Dual x) { return log(x); }
  __device__ friend Dual log2f(Dual x) { return log2(x); }
  __device__ friend Dual log1pf(Dual x) { return log1p(x); }
  __device__ friend Dual sqrtf(Dual x) { return sqrt(x); }
  __device__ friend Dual rsqrtf(Dual x) { return rsqrt(x); }
  __device__ friend Dual tanhf(Dual x) { return tanh(x); }
  __device__ friend Dual sinf(Dual x) { return sin(x); }
  __device__ friend Dual cosf(Dual x) { return cos(x); }
  __device__ friend Dual erff(Dual x) { return erf(x); }
  __device__ friend Dual powf(Dual x, Dual y) { return pow(x, y); }
  __device__ friend Dual fmaf(Dual a, Dual b, Dual c) { return fma(a, b, c); }
  __device__ friend Dual fabs(Dual x) { return abs(x); }
  __device__ friend Dual fabsf(Dual x) { return abs(x); }
  __device__ friend Dual fmin(Dual a, Dual b) { return min(a, b); }
  __device__ friend Dual fminf(Dual a, Dual b) { return min(a, b); }
  __device__ friend Dual fmax(Dual a, Dual b) { return max(a, b); }
  __device__ friend Dual fmaxf(Dual a, Dual b) { return max(a, b); }
  __device__ friend Dual floorf(Dual x) { return floor(x); }
  __device__ friend Dual ceilf(Dual x) { return ceil(x); }
  __device__ friend Dual rintf(Dual x) { return rint(x); }
  __device__ friend Dual __expf(Dual x) { return exp(x); }
  __device__ friend Dual __logf(Dual x) { return log(x); }

 private:
  __device__ static T times(T slope, T factor) { return slope == T(0) ? T(0) : slope * factor; }
};

}  // namespace cupyflash
