//! Symbolic integers: sizes, strides and offsets as expressions of a graph's symbols.
//!
//! A [`Dim`] is a polynomial with rational coefficients over *atoms*: symbols (run-time sizes) and floor divisions that do
//! not come out even. The form is canonical: terms sorted by monomial, no zero coefficients, so equal polynomials are
//! equal values. `h*w/64` is a term with coefficient 1/64: exact division is part of the number, and evaluation fails
//! where the result is not an integer (which means that a graph was used outside the class it was verified for).
//!
//! Invariant: every `Dim` is canonical; only this module builds terms.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};

/// A run-time size, an index into [`crate::ir::Graph::symbols`]; printed `s0`, `s1`, ...
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Sym(pub u32);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Atom {
    Sym(Sym),
    Floor(Box<Dim>, i64),
}

/// Product of atoms with powers, sorted by atom; empty = 1.
type Monomial = Vec<(Atom, u32)>;

/// A reduced fraction, denominator positive; 1/0 where a coefficient overflowed, which [`Dim::eval`] reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Ratio {
    num: i64,
    den: i64,
}

fn gcd(a: i128, b: i128) -> i128 {
    if b == 0 { a.abs().max(1) } else { gcd(b, a % b) }
}

impl Ratio {
    const OVERFLOW: Ratio = Ratio { num: 1, den: 0 };

    fn new(num: i64, den: i64) -> Self {
        Self::reduced(i128::from(num), i128::from(den))
    }
    fn reduced(num: i128, den: i128) -> Self {
        if den == 0 {
            return Self::OVERFLOW;
        }
        let g = gcd(num, den) * den.signum();
        match (i64::try_from(num / g), i64::try_from(den / g)) {
            (Ok(num), Ok(den)) => Self { num, den },
            _ => Self::OVERFLOW,
        }
    }
    fn add(self, o: Self) -> Self {
        let (an, ad, bn, bd) = (i128::from(self.num), i128::from(self.den), i128::from(o.num), i128::from(o.den));
        // Each product fits 126 bits.
        Self::reduced(an * bd + bn * ad, ad * bd)
    }
    fn mul(self, o: Self) -> Self {
        Self::reduced(i128::from(self.num) * i128::from(o.num), i128::from(self.den) * i128::from(o.den))
    }
}

type Term = (Monomial, Ratio);

thread_local! {
    static LATELY: RefCell<HashSet<Arc<[Term]>>> = RefCell::default();
}

/// Sums that a thread remembers: many models' worth.
const REMEMBERED: usize = 1 << 12;

/// `terms` where an equal sum of this thread has them. A plan has thousands of sizes and a few hundred different ones:
/// specializing reads all of them, and waited for memory at nearly each when each had terms of its own.
fn shared(terms: Vec<Term>) -> Arc<[Term]> {
    LATELY.with_borrow_mut(|lately| {
        if let Some(known) = lately.get(terms.as_slice()) {
            return known.clone();
        }
        if lately.len() >= REMEMBERED {
            lately.clear();
        }
        let terms: Arc<[Term]> = terms.into();
        lately.insert(terms.clone());
        terms
    })
}

/// A symbolic integer. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dim(Repr);

/// Specializing evaluates every size of a plan, and most are numbers: they lie where the `Dim` lies.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Repr {
    Constant(i64),
    /// Not an integer constant; never empty.
    Sum(Arc<[Term]>),
}

impl Default for Dim {
    fn default() -> Self {
        Self::constant(0)
    }
}

impl Dim {
    /// The constant `value`.
    pub const fn constant(value: i64) -> Self {
        Self(Repr::Constant(value))
    }

    /// The symbol `sym`.
    pub fn symbol(sym: Sym) -> Self {
        Self::of_atom(Atom::Sym(sym))
    }

    fn of_atom(atom: Atom) -> Self {
        Self(Repr::Sum(shared(vec![(vec![(atom, 1)], Ratio { num: 1, den: 1 })])))
    }

    /// The value if no symbol occurs.
    pub const fn as_constant(&self) -> Option<i64> {
        match self.0 {
            Repr::Constant(value) => Some(value),
            Repr::Sum(_) => None,
        }
    }

    fn terms(&self) -> Cow<'_, [Term]> {
        match &self.0 {
            Repr::Constant(0) => Cow::Borrowed(&[]),
            Repr::Constant(value) => Cow::Owned(vec![(Vec::new(), Ratio { num: *value, den: 1 })]),
            Repr::Sum(terms) => Cow::Borrowed(terms),
        }
    }

    /// From terms in canonical form.
    fn of_terms(terms: Vec<Term>) -> Self {
        match terms.as_slice() {
            [] => Self::default(),
            [(m, r)] if m.is_empty() && r.den == 1 => Self::constant(r.num),
            _ => Self(Repr::Sum(shared(terms))),
        }
    }

    /// True for the constant `value`.
    pub fn is(&self, value: i64) -> bool {
        self.as_constant() == Some(value)
    }

    fn from_terms(mut terms: Vec<Term>) -> Self {
        terms.sort_by(|a, b| a.0.cmp(&b.0));
        let mut out: Vec<Term> = Vec::with_capacity(terms.len());
        for (m, r) in terms {
            match out.last_mut() {
                Some(last) if last.0 == m => last.1 = last.1.add(r),
                _ => out.push((m, r)),
            }
        }
        out.retain(|(_, r)| r.num != 0);
        Self::of_terms(out)
    }

    fn scaled(&self, by: Ratio) -> Self {
        let terms = self.terms();
        Self::of_terms(terms.iter().map(|(m, r)| (m.clone(), r.mul(by))).filter(|(_, r)| r.num != 0).collect())
    }

    /// `self / divisor`, known to come out even for every binding the graph is used with.
    ///
    /// # Errors
    /// If `divisor` is zero.
    pub fn exact_div(&self, divisor: i64) -> Result<Self> {
        if divisor == 0 {
            return Err(Error::invalid("division of a size by zero"));
        }
        Ok(self.scaled(Ratio::new(1, divisor)))
    }

    /// `self / divisor` as polynomials if `divisor` is a single term that divides every term of `self`.
    pub fn checked_div(&self, divisor: &Dim) -> Option<Self> {
        if self == divisor {
            return Some(Dim::constant(1));
        }
        let by = divisor.terms();
        let [(dm, dr)] = &*by else { return None };
        let own = self.terms();
        let mut terms = Vec::with_capacity(own.len());
        for (m, r) in own.iter() {
            let mut q = m.clone();
            for (atom, power) in dm {
                let slot = q.iter_mut().find(|(a, _)| a == atom)?;
                slot.1 = slot.1.checked_sub(*power)?;
            }
            q.retain(|(_, p)| *p != 0);
            terms.push((q, r.mul(Ratio::new(dr.den, dr.num))));
        }
        Some(Self::from_terms(terms))
    }

    /// Floor division; stays exact where every coefficient divides.
    ///
    /// # Errors
    /// If `divisor` is not positive.
    pub fn floor_div(&self, divisor: i64) -> Result<Self> {
        if divisor <= 0 {
            return Err(Error::invalid(format!("floor division of a size by {divisor}")));
        }
        if let Some(c) = self.as_constant() {
            return Ok(Self::constant(c.div_euclid(divisor)));
        }
        let even = self.terms().iter().all(|(_, r)| r.den == 1 && r.num % divisor == 0);
        if even {
            return self.exact_div(divisor);
        }
        Ok(Self::of_atom(Atom::Floor(Box::new(self.clone()), divisor)))
    }

    /// The value under `bindings` (one entry per symbol of the graph).
    ///
    /// # Errors
    /// If a symbol is unbound, the result is not an integer, or it does not fit an `i64`.
    pub fn eval(&self, bindings: &[i64]) -> Result<i64> {
        let terms = match &self.0 {
            Repr::Constant(value) => return Ok(*value),
            Repr::Sum(terms) => terms,
        };
        if let Some(value) = eval_small(terms, bindings) {
            return Ok(value);
        }
        let (mut num, mut den) = (0i128, 1i128);
        for (m, r) in terms.iter() {
            let mut v = i128::from(r.num);
            for (atom, power) in m {
                let a = match atom {
                    Atom::Sym(s) => *bindings
                        .get(s.0 as usize)
                        .ok_or_else(|| Error::invalid(format!("size symbol s{} has no value", s.0)))?,
                    Atom::Floor(inner, d) => inner.eval(bindings)?.div_euclid(*d),
                };
                for _ in 0..*power {
                    v = v.checked_mul(i128::from(a)).ok_or_else(|| Error::invalid("a size overflows"))?;
                }
            }
            (num, den) = match i128::from(r.den) {
                1 if den == 1 => num.checked_add(v).map(|num| (num, 1)),
                d => add_fractions((num, den), (v, d)),
            }
            .ok_or_else(|| Error::invalid("a size overflows"))?;
        }
        if den != 1 && num % den != 0 {
            return Err(Error::invalid(format!("size {self} is not an integer at {bindings:?}")));
        }
        i64::try_from(if den == 1 { num } else { num / den }).map_err(|_| Error::invalid("a size overflows"))
    }

    /// Calls `f` for every symbol that occurs.
    pub fn visit_symbols(&self, f: &mut dyn FnMut(Sym)) {
        let Repr::Sum(terms) = &self.0 else { return };
        for (m, _) in terms.iter() {
            for (atom, _) in m {
                match atom {
                    Atom::Sym(s) => f(*s),
                    Atom::Floor(inner, _) => inner.visit_symbols(f),
                }
            }
        }
    }

    /// Product of `dims`; 1 for none.
    pub fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Dim {
        dims.into_iter().fold(Dim::constant(1), |acc, d| &acc * d)
    }
}

/// The sum, reduced; `None` past 128 bits or of no number. The product of a sum's denominators leaves 128 bits where
/// their least common multiple does not.
fn add_fractions((an, ad): (i128, i128), (bn, bd): (i128, i128)) -> Option<(i128, i128)> {
    if bd == 0 {
        return None;
    }
    let common = ad.checked_mul(bd / gcd(ad, bd))?;
    let num = an.checked_mul(common / ad)?.checked_add(bn.checked_mul(common / bd)?)?;
    let by = gcd(num, common);
    Some((num / by, common / by))
}

/// The sum where every term is an integer and nothing leaves 64 bits: nearly always.
fn eval_small(terms: &[Term], bindings: &[i64]) -> Option<i64> {
    let mut sum = 0i64;
    for (m, r) in terms {
        let mut value = r.num;
        for (atom, power) in m {
            let factor = match atom {
                Atom::Sym(s) => *bindings.get(s.0 as usize)?,
                Atom::Floor(inner, d) => inner.eval(bindings).ok()?.div_euclid(*d),
            };
            for _ in 0..*power {
                value = value.checked_mul(factor)?;
            }
        }
        if r.den != 1 {
            if value.checked_rem(r.den)? != 0 {
                return None;
            }
            value /= r.den;
        }
        sum = sum.checked_add(value)?;
    }
    Some(sum)
}

impl From<i64> for Dim {
    fn from(value: i64) -> Self {
        Self::constant(value)
    }
}

impl std::ops::Add for &Dim {
    type Output = Dim;
    fn add(self, o: &Dim) -> Dim {
        match (&self.0, &o.0) {
            (Repr::Constant(0), _) => o.clone(),
            (_, Repr::Constant(0)) => self.clone(),
            (Repr::Constant(a), Repr::Constant(b)) if a.checked_add(*b).is_some() => Dim::constant(a + b),
            _ => Dim::from_terms(self.terms().iter().chain(&*o.terms()).cloned().collect()),
        }
    }
}

impl std::ops::Sub for &Dim {
    type Output = Dim;
    fn sub(self, o: &Dim) -> Dim {
        self + &o.scaled(Ratio { num: -1, den: 1 })
    }
}

impl std::ops::Mul for &Dim {
    type Output = Dim;
    fn mul(self, o: &Dim) -> Dim {
        match (&self.0, &o.0) {
            (Repr::Constant(1), _) => return o.clone(),
            (_, Repr::Constant(1)) => return self.clone(),
            (Repr::Constant(a), Repr::Constant(b)) => {
                if let Some(product) = a.checked_mul(*b) {
                    return Dim::constant(product);
                }
            }
            _ => {}
        }
        let (own, other) = (self.terms(), o.terms());
        let mut terms = Vec::with_capacity(own.len() * other.len());
        for (ma, ra) in own.iter() {
            for (mb, rb) in other.iter() {
                let mut m = ma.clone();
                for (atom, power) in mb {
                    match m.iter_mut().find(|(a, _)| a == atom) {
                        Some(slot) => slot.1 += power,
                        None => m.push((atom.clone(), *power)),
                    }
                }
                m.sort();
                terms.push((m, ra.mul(*rb)));
            }
        }
        Dim::from_terms(terms)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let terms = self.terms();
        if terms.is_empty() {
            return f.write_str("0");
        }
        for (i, (m, r)) in terms.iter().enumerate() {
            if r.num < 0 {
                f.write_str("-")?;
            } else if i > 0 {
                f.write_str("+")?;
            }
            let mut factors = Vec::new();
            if r.num.abs() != 1 || m.is_empty() {
                factors.push(r.num.unsigned_abs().to_string());
            }
            for (atom, power) in m {
                for _ in 0..*power {
                    factors.push(match atom {
                        Atom::Sym(s) => format!("s{}", s.0),
                        Atom::Floor(inner, d) => format!("floor({inner},{d})"),
                    });
                }
            }
            f.write_str(&factors.join("*"))?;
            if r.den != 1 {
                write!(f, "/{}", r.den)?;
            }
        }
        Ok(())
    }
}

impl std::str::FromStr for Dim {
    type Err = Error;

    /// Parses what [`Display`](fmt::Display) prints: sums of `[-]factor*factor/int`, a factor being an integer, `s0` or
    /// `floor(expr,int)`.
    fn from_str(text: &str) -> Result<Self> {
        let mut p = DimParser { text: text.as_bytes(), at: 0, depth: 0 };
        let dim = p.sum()?;
        if p.at != p.text.len() {
            return Err(p.unexpected());
        }
        Ok(dim)
    }
}

struct DimParser<'a> {
    text: &'a [u8],
    at: usize,
    depth: u32,
}

impl DimParser<'_> {
    fn unexpected(&self) -> Error {
        Error::invalid(format!(
            "size expression `{}`: unexpected input at {}",
            String::from_utf8_lossy(self.text),
            self.at
        ))
    }

    fn take(&mut self, c: u8) -> bool {
        let hit = self.text.get(self.at) == Some(&c);
        self.at += usize::from(hit);
        hit
    }

    fn sum(&mut self) -> Result<Dim> {
        let mut sum = Dim::default();
        let mut sign = if self.take(b'-') { -1 } else { 1 };
        loop {
            sum = &sum + &self.term()?.scaled(Ratio { num: sign, den: 1 });
            sign = match (self.take(b'+'), self.text.get(self.at)) {
                (true, _) => 1,
                (false, Some(b'-')) => {
                    self.at += 1;
                    -1
                }
                _ => return Ok(sum),
            };
        }
    }

    fn term(&mut self) -> Result<Dim> {
        let mut product = self.factor()?;
        loop {
            if self.take(b'*') {
                product = &product * &self.factor()?;
            } else if self.take(b'/') {
                let divisor = self.integer()?;
                product = product.exact_div(divisor)?;
            } else {
                return Ok(product);
            }
        }
    }

    fn factor(&mut self) -> Result<Dim> {
        if self.take(b's') {
            let index = u32::try_from(self.integer()?).map_err(|_| self.unexpected())?;
            return Ok(Dim::symbol(Sym(index)));
        }
        if self.text[self.at..].starts_with(b"floor(") {
            self.at += 6;
            self.depth += 1;
            if self.depth > 16 {
                return Err(self.unexpected());
            }
            let inner = self.sum()?;
            let comma = self.take(b',');
            let divisor = self.integer()?;
            self.depth -= 1;
            if !comma || !self.take(b')') {
                return Err(self.unexpected());
            }
            return inner.floor_div(divisor);
        }
        Ok(Dim::constant(self.integer()?))
    }

    fn integer(&mut self) -> Result<i64> {
        let start = self.at;
        while self.text.get(self.at).is_some_and(u8::is_ascii_digit) {
            self.at += 1;
        }
        let digits = std::str::from_utf8(&self.text[start..self.at]).map_err(|_| self.unexpected())?;
        digits.parse().map_err(|_| self.unexpected())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, bindings: &[i64], expect: i64) {
        let dim: Dim = text.parse().unwrap();
        assert_eq!(dim.to_string().parse::<Dim>().unwrap(), dim, "{text} does not round-trip");
        assert_eq!(dim.eval(bindings).unwrap(), expect, "{text}");
    }

    #[test]
    fn evaluates_and_round_trips() {
        check("0", &[], 0);
        check("s0*s1/64", &[64, 32], 32);
        check("96-s0/32", &[64], 94);
        check("s1+s0*s0/256", &[32, 77], 81);
        check("floor(s0-1,2)+1", &[7], 4);
        check("2*floor(s0+s1,3)", &[4, 4], 4);
        check("s0/2+s0*s0/2", &[3], 6);
        check("s0*s1-s0*s1+4", &[i64::MAX, i64::MAX], 4);
        check("4611686018427387904*s0/4", &[4], 4_611_686_018_427_387_904);
        // Thirteen denominators of 1024, whose product has 130 bits: (1 + 3 + ... + 23 + 25*240)/1024.
        let terms: Vec<String> = (0..13).map(|at| format!("{}*s{at}/1024", 2 * at + 1)).collect();
        check(&terms.join("+"), &[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 240], 6);
    }

    #[test]
    fn is_canonical() {
        let a: Dim = "s0*s1/2".parse().unwrap();
        let b: Dim = "s1/2*s0".parse().unwrap();
        assert_eq!(a, b);
        assert!((&a - &b).is(0));
        assert_eq!("2*s0".parse::<Dim>().unwrap().floor_div(2).unwrap(), "s0".parse().unwrap());
        assert_eq!(a.checked_div(&"s0".parse().unwrap()), Some("s1/2".parse().unwrap()));
        assert_eq!("s0+1".parse::<Dim>().unwrap().checked_div(&"s0".parse().unwrap()), None);
    }

    #[test]
    fn refuses_what_is_not_an_integer() {
        assert!("s0/8".parse::<Dim>().unwrap().eval(&[12]).is_err());
        assert!("s3".parse::<Dim>().unwrap().eval(&[1]).is_err());
        for overflow in ["9223372036854775807*2*s0", "s0/9223372036854775807+s0/9223372036854775806"] {
            assert!(overflow.parse::<Dim>().is_ok_and(|d| d.eval(&[1]).is_err()), "{overflow}");
        }
        for bad in ["", "s", "1+", "floor(s0)", "s0/0", "(s0)", "99999999999999999999"] {
            assert!(bad.parse::<Dim>().is_err(), "{bad}");
        }
    }
}
