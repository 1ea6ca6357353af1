(** The M-th largest key, found digit by digit from the leading one by counting.

    Keys are natural numbers of [n] digits to the base [b], such as the 32 bits of a share that is not
    negative, four at a time: eight digits to the base 16. *)
From mathcomp Require Import all_ssreflect.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.

Implicit Types (s : seq nat) (b n m d t w x : nat).

Definition count_gt tau s := count (fun x => tau < x) s.
Definition count_ge tau s := count (fun x => tau <= x) s.

(** The largest leading digit d < b such that at least m keys have a leading digit >= d. *)
Fixpoint pick_digit b m (digits : seq nat) : nat :=
  if b is b'.+1 then
    if m <= count_ge b' digits then b' else pick_digit b' m digits
  else 0.

(** The m-th largest of keys of n digits: settle the leading digit by counting, then go on with the
    remaining digits of the keys that have it and with the rank that is left among them. *)
Fixpoint radix b n m s : nat :=
  if n is n'.+1 then
    let w := b ^ n' in
    let lead := [seq x %/ w | x <- s] in
    let d := pick_digit b m lead in
    d * w + radix b n' (m - count_gt d lead) [seq x %% w | x <- s & x %/ w == d]
  else 0.

(** How many of the keys equal to the threshold are wanted: the rank that is left at the end. *)
Fixpoint need b n m s : nat :=
  if n is n'.+1 then
    let w := b ^ n' in
    let lead := [seq x %/ w | x <- s] in
    let d := pick_digit b m lead in
    need b n' (m - count_gt d lead) [seq x %% w | x <- s & x %/ w == d]
  else m.

Lemma count_geS d s : count_ge d.+1 s = count_gt d s.
Proof. by []. Qed.

Lemma count_ge0 s : count_ge 0 s = size s.
Proof. by apply/eqP; rewrite -all_count; apply/allP. Qed.

(** Keys at or above d are those above it and those equal to it. *)
Lemma count_ge_split d s : count_ge d s = count_gt d s + count_mem d s.
Proof.
elim: s => //= x s; rewrite /count_ge /count_gt /= => ->; rewrite leq_eqVlt eq_sym.
by case: (ltngtP d x) => //= _; rewrite ?add0n ?add1n ?addnS ?addSn.
Qed.

Lemma pick_digit_lt b m digits : 0 < b -> pick_digit b m digits < b.
Proof.
elim: b => //= b IH _; case: ifP => // _; case: b => [|b] in IH *; first by [].
by apply: leq_trans (IH isT) _.
Qed.

(** The picked digit has at least m keys at or above it and, if m > 0, fewer than m above. *)
Lemma pick_digitP b m digits :
  0 < b -> all (fun x => x < b) digits -> m <= size digits ->
  let d := pick_digit b m digits in
  m <= count_ge d digits /\ count_gt d digits <= m.-1.
Proof.
move=> b0 below m_le.
have none : count_gt b.-1 digits <= m.-1.
  rewrite -count_geS prednK // /count_ge (eq_in_count (a2 := pred0)) ?count_pred0 // => x xs.
  by rewrite leqNgt (allP below).
clear below; elim: b b0 none => //= b IH _ none.
case: ifP => [// | /negbT]; rewrite -ltnNge => few.
case: b => [|b] in IH none few *; first by rewrite count_ge0 ltnNge m_le in few.
by apply: IH => //; rewrite -count_geS -ltnS (leq_trans few) // leqSpred.
Qed.

(** Comparing two numbers by their leading part first. *)
Lemma ltn_lead w d t x :
  t < w -> (d * w + t < x) = (d < x %/ w) || ((x %/ w == d) && (t < x %% w)).
Proof.
move=> tw; have w0 : 0 < w by apply: leq_ltn_trans tw.
case: (ltngtP d (x %/ w)) => [dx|dx|->] /=.
- rewrite {1}(divn_eq x w) (leq_trans (n := d.+1 * w)) //; last first.
    by apply: leq_trans (leq_addr _ _); rewrite leq_mul2r dx orbT.
  by rewrite mulSn addnC ltn_add2r.
- apply/negbTE; rewrite -leqNgt {1}(divn_eq x w) ltnW //.
  apply: leq_trans (leq_addr _ _).
  apply: (@leq_trans ((x %/ w).+1 * w)); last by rewrite leq_mul2r dx orbT.
  by rewrite mulSn addnC ltn_add2r ltn_mod.
- by rewrite {2}(divn_eq x w) ltn_add2l.
Qed.

(** So counting splits: keys with a larger leading digit, and those with the digit and a larger rest. *)
Lemma count_gt_lead w d t s :
  t < w ->
  count_gt (d * w + t) s =
  count_gt d [seq x %/ w | x <- s] + count_gt t [seq x %% w | x <- s & x %/ w == d].
Proof.
move=> tw; rewrite /count_gt !count_map count_filter -[RHS]count_predUI.
rewrite [X in _ = _ + X](eq_count (a2 := pred0)) ?count_pred0 ?addn0 => [|x] /=.
  by apply: eq_count => x; rewrite /= ltn_lead // andbC.
by case: (ltngtP d (x %/ w)) => //; rewrite ?andbF.
Qed.

Lemma count_mem_lead w d t s :
  t < w -> count_mem (d * w + t) s = count_mem t [seq x %% w | x <- s & x %/ w == d].
Proof.
move=> tw; rewrite count_map count_filter; apply: eq_count => x /=.
apply/eqP/andP => [->|[/eqP xt /eqP xd]]; last by rewrite {1}(divn_eq x w) xd xt.
have w0 : 0 < w by apply: leq_ltn_trans tw.
by rewrite divnMDl // modnMDl divn_small // modn_small // addn0.
Qed.

(** The rank that is left when c larger keys are set aside. *)
Lemma leq_add_pred c a m : c <= m.-1 -> a <= (m - c).-1 -> c + a <= m.-1.
Proof.
case: m => [|m] /= c_le; first by rewrite leqn0 in c_le; rewrite (eqP c_le).
by rewrite subSn //= leq_subRL.
Qed.

(** The threshold has n digits. *)
Lemma radix_lt b n m s : 0 < b -> radix b n m s < b ^ n.
Proof.
move=> b0; elim: n m s => //= n IH m s; rewrite expnS; set d := pick_digit _ _ _.
apply: (@leq_trans (d.+1 * b ^ n)); last by rewrite leq_mul2r pick_digit_lt ?orbT.
by rewrite mulSn addnC ltn_add2r IH.
Qed.

(** The radix search finds the m-th largest key: at least m keys are at or above it, fewer than m above. *)
Theorem radix_threshold b n m s :
  0 < b -> all (fun x => x < b ^ n) s -> m <= size s ->
  let tau := radix b n m s in
  m <= count_ge tau s /\ count_gt tau s <= m.-1.
Proof.
move=> b0; elim: n m s => [|n IH] m s below m_le /=.
  split=> //; rewrite /count_gt (eq_in_count (a2 := pred0)) ?count_pred0 // => x /(allP below).
  by rewrite expn0 ltnS leqn0 => /eqP->.
set w := b ^ n; set lead := [seq x %/ w | x <- s].
have w0 : 0 < w by rewrite expn_gt0 b0.
have lead_below : all (fun x => x < b) lead.
  by apply/allP => _ /mapP[x xs ->]; rewrite ltn_divLR // -expnS (allP below).
have [|d_ge d_gt] := @pick_digitP b m lead b0 lead_below; first by rewrite size_map.
set d := pick_digit b m lead in d_ge d_gt *.
set rest := [seq x %% w | x <- s & x %/ w == d].
have size_rest : size rest = count_mem d lead by rewrite size_map size_filter count_map.
have [||t_ge t_gt] := IH (m - count_gt d lead) rest.
- by apply/allP => _ /mapP[x _ ->]; rewrite ltn_mod.
- by rewrite leq_subLR size_rest -count_ge_split.
have t_lt : radix b n (m - count_gt d lead) rest < w by apply: radix_lt.
set t := radix _ _ _ _ in t_lt t_ge t_gt *.
have gt_split : count_gt (d * w + t) s = count_gt d lead + count_gt t rest.
  exact: count_gt_lead.
split.
- rewrite count_ge_split gt_split count_mem_lead // -/rest -addnA -count_ge_split.
  by rewrite -leq_subLR.
- by rewrite gt_split; apply: leq_add_pred.
Qed.

(** What is wanted of the keys equal to the threshold is M less the keys above it. *)
Lemma needE b n m s :
  0 < b -> all (fun x => x < b ^ n) s -> need b n m s = m - count_gt (radix b n m s) s.
Proof.
move=> b0; elim: n m s => [|n IH] m s below /=.
  rewrite /count_gt (eq_in_count (a2 := pred0)) ?count_pred0 ?subn0 // => x /(allP below).
  by rewrite expn0 ltnS leqn0 => /eqP->.
rewrite count_gt_lead ?radix_lt // subnDA IH //.
by apply/allP => _ /mapP[x _ ->]; rewrite ltn_mod expn_gt0 b0.
Qed.
