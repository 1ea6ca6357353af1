(** Log-sum-exp: how far it moves when its arguments move, and what that says of a page's log-mass.

    A page is a set of tokens; [x] gives each token its logit. *)
From Coq Require Import Reals Lra.
From mathcomp Require Import all_ssreflect.
From Locks Require Import real_sum.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Local Open Scope R_scope.

Section LogSumExp.
Variable I : finType.
Implicit Types (A B : {set I}) (x y : I -> R).

Definition mass A x : R := \sum_(i in A) exp (x i).
Definition lse A x : R := ln (mass A x).

Lemma mass_ge0 A x : 0 <= mass A x.
Proof. by apply: sum_ge0 => i _; apply/Rlt_le/exp_pos. Qed.

Lemma mass_gt0 A x : A != set0 -> 0 < mass A x.
Proof.
case/set0Pn=> i iA; apply: Rlt_le_trans (exp_pos (x i)) _.
by apply: (sum_ge_term (F := fun i => exp (x i))) => // j _; apply/Rlt_le/exp_pos.
Qed.

Lemma exp_lse A x : A != set0 -> exp (lse A x) = mass A x.
Proof. by move=> A0; rewrite /lse exp_ln //; apply: mass_gt0. Qed.

Lemma mass_disjoint A B x : [disjoint A & B] -> mass (A :|: B) x = mass A x + mass B x.
Proof.
by move=> AB; rewrite /mass -bigU //; apply: eq_bigl => i; rewrite !inE.
 Qed.

(** ln is monotone also where its arguments are equal. *)
Lemma ln_mono a b : 0 < a -> a <= b -> ln a <= ln b.
Proof. by move=> a0 [/(ln_increasing _ _ a0)/Rlt_le | ->]; [| lra]. Qed.

(** Raising every logit by at most c raises the log-mass by at most c. *)
Lemma lse_le_shift A x y c :
  A != set0 -> (forall i, i \in A -> x i <= y i + c) -> lse A x <= lse A y + c.
Proof.
move=> A0 xy; have -> : lse A y + c = ln (mass A y * exp c).
  by rewrite ln_mult ?ln_exp //; [apply: mass_gt0 | apply: exp_pos].
apply: ln_mono; first exact: mass_gt0.
rewrite /mass -sum_scale_r; apply: sum_le => i iA; rewrite -exp_plus.
by case: (xy i iA) => [/exp_increasing/Rlt_le | ->]; [| lra].
Qed.

(** The largest distance of two families of logits on A. *)
Definition max_gap A x y : R := max_over A (fun i => Rabs (x i - y i)).

Lemma max_gap_ge A x y i : i \in A -> Rabs (x i - y i) <= max_gap A x y.
Proof. exact: (max_over_ge (fun i => Rabs (x i - y i))). Qed.

Lemma max_gap_attained A x y :
  A != set0 -> exists2 i, i \in A & max_gap A x y = Rabs (x i - y i).
Proof. by move=> A0; apply: max_over_attained => // i _; apply: Rabs_pos. Qed.

Lemma lse_near A x y c :
  A != set0 -> (forall i, i \in A -> Rabs (x i - y i) <= c) -> Rabs (lse A x - lse A y) <= c.
Proof.
move=> A0 near; apply: Rabs_le.
have up : lse A x <= lse A y + c.
  by apply: lse_le_shift => // i /near/abs_le_bounds; lra.
have down : lse A y <= lse A x + c.
  by apply: lse_le_shift => // i /near/abs_le_bounds; lra.
lra.
Qed.

(** Log-sum-exp is 1-Lipschitz in the maximum norm. *)
Theorem lse_lipschitz A x y : A != set0 -> Rabs (lse A x - lse A y) <= max_gap A x y.
Proof. by move=> A0; apply: lse_near => // i; apply: max_gap_ge. Qed.

(** The constant 1 cannot be improved: a common shift moves the log-mass by just as much. *)
Lemma lse_lipschitz_sharp A x c :
  A != set0 -> lse A (fun i => x i + c) - lse A x = c.
Proof.
move=> A0; have up : lse A (fun i => x i + c) <= lse A x + c.
  by apply: lse_le_shift => // i _; lra.
have down : lse A x <= lse A (fun i => x i + c) + (- c).
  by apply: lse_le_shift => // i _; lra.
lra.
Qed.

(** [e] bounds the error of the estimate [est] of the log-mass of A. *)
Definition in_interval A x (est e : R) : Prop := est - e <= lse A x <= est + e.

(** Disjoint intervals order two pages as their masses are ordered. *)
Lemma disjoint_intervals_order A B x estA eA estB eB :
  in_interval A x estA eA -> in_interval B x estB eB ->
  estA + eA < estB - eB -> lse A x < lse B x.
Proof. rewrite /in_interval; lra. Qed.

End LogSumExp.

Section Records.
Variables (D : nat) (I : finType).

(** Logits of the query q against keys k: scale * q.k for every token. *)
Definition logits (scale : R) (q : vec D) (k : I -> vec D) : I -> R :=
  fun i => scale * dot q (k i).

(** The half-width of a page's interval: [rho] bounds the distance of each key of the page from what
    its record reconstructs, [delta] the error made in computing the estimate itself. *)
Definition half_width (scale : R) (q : vec D) (rho delta : R) : R :=
  Rabs scale * norm q * rho + delta.

(** Cauchy-Schwarz for one token: a key that is off by at most rho moves its logit by |scale| |q| rho. *)
Lemma logit_error scale q (k khat : I -> vec D) rho i :
  norm (sub_vec (k i) (khat i)) <= rho ->
  Rabs (logits scale q k i - logits scale q khat i) <= Rabs scale * norm q * rho.
Proof.
move=> near; have -> : logits scale q k i - logits scale q khat i =
                       scale * dot q (sub_vec (k i) (khat i)).
  by rewrite dot_subr /logits; lra.
rewrite Rabs_mult Rmult_assoc; apply: Rmult_le_compat_l; first exact: Rabs_pos.
apply: Rle_trans (cauchy_schwarz _ _) _.
by apply: Rmult_le_compat_l near; apply: norm_ge0.
Qed.

(** A record gives an interval that holds the exact log-mass of its page. *)
Lemma record_interval scale q (k khat : I -> vec D) (A : {set I}) rho est delta :
  A != set0 ->
  (forall i, i \in A -> norm (sub_vec (k i) (khat i)) <= rho) ->
  Rabs (est - lse A (logits scale q khat)) <= delta ->
  in_interval A (logits scale q k) est (half_width scale q rho delta).
Proof.
move=> A0 near computed.
have moved : Rabs (lse A (logits scale q k) - lse A (logits scale q khat))
             <= Rabs scale * norm q * rho.
  by apply: lse_near => // i iA; apply/logit_error/near.
move/abs_le_bounds: computed; move/abs_le_bounds: moved.
by rewrite /in_interval /half_width; lra.
Qed.

(** An interval for each page's log-mass from the records alone; two pages whose intervals are disjoint
    are ordered for certain. [khat] is what the records reconstruct after dequantisation. *)
Theorem mass_interval scale q (k khat : I -> vec D) (N : nat) (page : 'I_N -> {set I})
    (rho est delta : 'I_N -> R) :
  (forall n, page n != set0) ->
  (forall n i, i \in page n -> norm (sub_vec (k i) (khat i)) <= rho n) ->
  (forall n, Rabs (est n - lse (page n) (logits scale q khat)) <= delta n) ->
  let e n := half_width scale q (rho n) (delta n) in
  (forall n, est n - e n <= lse (page n) (logits scale q k) <= est n + e n) /\
  (forall n n', est n + e n < est n' - e n' ->
     lse (page n) (logits scale q k) < lse (page n') (logits scale q k)).
Proof.
move=> page0 near computed e.
have interval n : in_interval (page n) (logits scale q k) (est n) (e n).
  by apply: record_interval => // i; apply: near.
split=> // n n'; exact: disjoint_intervals_order.
Qed.

(** The premises can always be met: the largest distance in a page is such a rho, the exact value of
    the estimate has delta = 0. *)
Lemma mass_interval_premises scale q (k khat : I -> vec D) (A : {set I}) :
  let dist i := norm (sub_vec (k i) (khat i)) in
  (forall i, i \in A -> dist i <= max_over A dist) /\
  Rabs (lse A (logits scale q khat) - lse A (logits scale q khat)) <= 0.
Proof.
split; first by move=> i; apply: (max_over_ge (fun i => norm (sub_vec (k i) (khat i)))).
by rewrite Rminus_diag_eq // Rabs_R0; lra.
Qed.

End Records.
